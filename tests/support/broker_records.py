"""Workers, loads, jobs and tasks with only the fields that a test is about."""

from common.messages.ids import (
    EntryId,
    Epoch,
    Fingerprint,
    GatewayId,
    ModelName,
    PlacementNumber,
    RequestId,
    TryNumber,
    WorkerId,
)
from common.messages.job import Job, PrefillTask
from common.messages.registry import ModelCard, Role, WorkerHealth, WorkerLoad, WorkerRecord
from common.messages.sampling import SamplingParams

MODEL = ModelName("acme/{tiny}\n1")
FINGERPRINT = Fingerprint("f00d")
SAMPLING = SamplingParams(seed=1, max_tokens=16)
D0, D1, D2 = WorkerId("decode-0"), WorkerId("decode-1"), WorkerId("decode:2 {x}")
EPOCH = Epoch(1 << 62)
P0, P1 = (WorkerId("prefill-0"), Epoch(8)), (WorkerId("prefill-1"), Epoch(9))


def worker_record(
    name: str = D0,
    epoch: int = EPOCH,
    *,
    role: Role = Role.DECODE,
    num_blocks: int = 100,
    max_sequences: int = 8,
) -> WorkerRecord:
    """Return the record of a worker."""
    return WorkerRecord(
        worker=WorkerId(name),
        role=role,
        epoch=Epoch(epoch),
        model=MODEL,
        fingerprint=FINGERPRINT,
        address="127.0.0.1:1",
        pid=1,
        num_blocks=num_blocks,
        block_size=16,
        max_context=1024,
        max_sequences=max_sequences,
    )


def worker_load(
    blocks_free: int = 100,
    *,
    health: WorkerHealth = WorkerHealth.READY,
    num_running: int = 0,
    absorbed: EntryId | None = None,
) -> WorkerLoad:
    """Return the load of a worker."""
    return WorkerLoad(
        health=health, blocks_total=100, blocks_free=blocks_free, num_running=num_running, absorbed=absorbed
    )


def make_job(
    request: str,
    placement: int = 1,
    *,
    gateway: str = "gateway-0",
    prompt: bytes = b"\0" * 64,
    time_left_s: float | None = None,
) -> Job:
    """Return a placement of a request."""
    return Job(
        request=RequestId(request),
        placement=PlacementNumber(placement),
        gateway=GatewayId(gateway),
        model=MODEL,
        num_prompt_tokens=len(prompt) // 4,
        sampling=SAMPLING,
        prompt=prompt,
        time_left_s=time_left_s,
    )


def make_task(request: str, try_number: int = 1) -> PrefillTask:
    """Return a try to prefill a request."""
    return PrefillTask(
        request=RequestId(request),
        placement=PlacementNumber(1),
        try_number=TryNumber(try_number),
        author=D0,
        author_epoch=Epoch(7),
        gateway=GatewayId("gateway-0"),
        num_tokens=16,
        num_prompt_tokens=16,
        sampling=SAMPLING,
    )


def make_card(*, created: int = 1) -> ModelCard:
    """Return the card of a model."""
    return ModelCard(
        model=MODEL,
        fingerprint=FINGERPRINT,
        tokenizer=b"\0\xff",
        vocab_size=32,
        max_context=1024,
        eos_ids=(2,),
        created=created,
    )
