"""The bench beside other engines gives everybody the same new prompts, and says of the answers what they show."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from bench.peers.client import Client
from bench.peers.engines import LABELS
from bench.peers.figures import Incomplete, figures, is_good
from bench.peers.plan import NAMES, QUICK, Ask, Sizes, Workload, plan
from bench.peers.report import Record, load, write_document, write_json
from bench.peers.weights import write_weights
from common.model.checkpoint import open_checkpoint
from tandem.bench.outcome import Outcome
from tests.support.polling import until
from tests.support.tiny_models import write_tiny_llama


def outcome(arrived_s: float, *times_s: float) -> Outcome:
    return Outcome(arrived_s, times_s[-1], times_s, 4, len(times_s))


def asks(*nums_tokens: int) -> list[Ask]:
    return [Ask([1, 2, 3, 4], num) for num in nums_tokens]


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_makes_the_prompts_and_none_begins_like_another(name: str) -> None:
    workload = plan(name, 7, Sizes())
    assert workload == plan(name, 7, Sizes())
    prompts = [tuple(ask.prompt[:16]) for seed in (7, 8) for ask in plan(name, seed, Sizes()).asks]
    assert len(set(prompts)) == len(prompts)


def test_mixed_traffic_is_chats_and_long_prompts_at_the_rate() -> None:
    asks = plan("mixed-1", 1, Sizes(mixed_s=1000.0)).asks
    lengths = [len(ask.prompt) for ask in asks]
    assert all(60 <= length <= 300 or 1024 <= length <= 4096 for length in lengths)
    assert sum(length <= 300 for length in lengths) / len(lengths) == pytest.approx(0.8, abs=0.05)
    assert len(asks) == pytest.approx(1000, rel=0.1)
    assert [ask.at_s for ask in asks] == sorted(ask.at_s for ask in asks)


def test_the_rate_counts_from_the_first_request_to_the_last_token() -> None:
    found = figures(Workload("streams-2", asks(3, 2), 2), [outcome(1.0, 1.5, 1.7, 1.8), outcome(1.2, 1.4, 3.0)])
    assert found["tokens_per_s"] == pytest.approx(5 / 2.0)
    assert found["ttft_p50_ms"] == pytest.approx(350)
    assert found["itl_p50_ms"] == pytest.approx(200)


def test_a_burst_is_over_with_its_last_first_token_and_only_gaps_within_it_count() -> None:
    burst = [Ask(range(100), 1, 2.0), Ask(range(100), 1, 2.0)]
    workload = Workload("prefill", [*asks(5), *burst], burst_at_s=2.0)
    running = outcome(0.0, 0.5, 1.9, 2.2, 3.9, 9.0)
    found = figures(workload, [running, outcome(2.0, 3.0), outcome(2.0, 4.0)])
    assert found["prompt_tokens_per_s"] == pytest.approx(100)
    assert found["itl_p99_ms"] == pytest.approx(1000 * (1.7 + 0.98 * (5.1 - 1.7)))
    assert found["running_tokens_per_s"] == pytest.approx(1.5)


def test_a_stream_that_begins_behind_the_burst_spoils_the_round() -> None:
    workload = Workload("prefill", [*asks(2), Ask([1], 1, 2.0)], burst_at_s=2.0)
    with pytest.raises(Incomplete, match="has not begun"):
        figures(workload, [outcome(0.0, 2.5, 2.6), outcome(2.0, 3.0)])


def test_goodput_counts_answers_that_met_both_objectives() -> None:
    quick, late, halting = outcome(0.0, 0.9, 1.0), outcome(0.0, 1.1, 1.2), outcome(0.0, 0.1, 0.3)
    assert [is_good(one) for one in (quick, late, halting)] == [True, False, False]
    found = figures(Workload("mixed-1", asks(2, 2, 2), duration_s=4.0), [quick, late, halting])
    assert found["goodput_per_s"] == pytest.approx(0.25)


@pytest.mark.parametrize("bad", [outcome(0.0, 1.0), Outcome(0.0, 0.0, error="refused"), Outcome(0.0, 0.0, (), 4, 2)])
def test_an_answer_that_is_not_whole_spoils_the_round(bad: Outcome) -> None:
    with pytest.raises(Incomplete):
        figures(Workload("streams-1", asks(2), 1), [bad])


@asynccontextmanager
async def server(answers: bytes, seen: list[bytes], *, hangs_up: bool = False) -> AsyncIterator[int]:
    """Answer every request with the same bytes."""

    handlers: list[asyncio.Task[None]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().partition(b"content-length:")[2].split()[0])
                seen.append(await reader.readexactly(size))
                writer.write(answers)
                if hangs_up:
                    break
        writer.close()
        await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.create_task(serve(reader, writer)))

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]
        await asyncio.gather(*handlers)


def streamed(*events: str) -> bytes:
    parts = [f"data: {event}\n\n".encode() for event in (*events, "[DONE]")]
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


ANSWER = streamed(
    '{"choices":[{"text":"a"}]}',
    '{"choices":[{"text":"b c"}]}',
    '{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3}}',
)


async def test_the_client_counts_tokens_by_usage_and_times_by_events() -> None:
    seen: list[bytes] = []
    async with server(ANSWER, seen) as port:
        client = Client(port)
        (found,) = await client.run(Workload("streams-1", asks(3), 1))
        client.close()
    assert found.error is None
    assert (found.num_output_tokens, len(found.token_times_s)) == (3, 2)
    body = json.loads(seen[0])
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([1, 2, 3, 4], 3, 0)
    assert body["ignore_eos"] is True


async def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    seen: list[bytes] = []
    async with server(ANSWER, seen, hangs_up=True) as port:
        client = Client(port)
        for _ in range(2):
            (found,) = await client.run(Workload("streams-1", asks(3), 1))
            assert found.error is None
            await until(lambda: not any(connection.is_open for connection in client.idle))
        client.close()
    assert len(seen) == 2


async def test_a_refusal_is_told() -> None:
    refusal = b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\n\r\n{}"
    async with server(refusal, []) as port:
        client = Client(port)
        (found,) = await client.run(Workload("streams-1", asks(3), 1))
        client.close()
    assert found.error is not None
    assert "503" in found.error


def test_the_written_weights_are_those_of_the_checkpoint_in_bf16(tmp_path: Path) -> None:
    source = open_checkpoint(write_tiny_llama(tmp_path / "model"))
    written = write_weights(str(tmp_path / "model"), tmp_path / "cache")
    assert write_weights(str(tmp_path / "model"), tmp_path / "cache") == written
    target = open_checkpoint(written)
    assert target.config == source.config
    assert target.names() == source.names()
    for name in source.names():
        assert torch.equal(target.tensor(name, torch.bfloat16), source.tensor(name, torch.bfloat16)), name
    ours, theirs = target.card_source(), source.card_source()
    assert (ours.tokenizer_json, ours.eos_ids) == (theirs.tokenizer_json, theirs.eos_ids)


def complete_record() -> Record:
    record = Record()
    for name in NAMES:
        for place, engine in enumerate(LABELS):
            for noise in (0.0, 1.0, 50.0):
                record.add(name, engine, {"tokens_per_s": 100.0 * (place + 1) + noise, "goodput_per_s": 1.0})
    return record


def test_a_document_gets_medians_and_ratios_of_a_complete_record_only(tmp_path: Path) -> None:
    file = tmp_path / "performance.md"
    before = "a\n<!-- bench-peers -->\nold\n<!-- /bench-peers -->\nz\n"
    file.write_text(before)
    part = complete_record()
    del part.rounds["prefill"]["vllm"]
    assert not write_document(part, file)
    assert file.read_text() == before
    assert write_document(complete_record(), file)
    text = file.read_text()
    assert text.startswith("a\n<!-- bench-peers -->\n")
    assert text.endswith("<!-- /bench-peers -->\nz\n")
    assert "old" not in text
    assert "| 8 streams: tokens/s | 101 | 201 | 301 | 0.502 | 0.336 |" in text


def test_pieces_of_one_commit_are_put_together(tmp_path: Path) -> None:
    record = Record()
    record.add("lone", "tandem", {"ttft_p50_ms": 3.0})
    write_json(tmp_path / "peers.json", record)
    again = load(tmp_path / "peers.json")
    again.add("lone", "tandem", {"ttft_p50_ms": 5.0})
    assert again.median("lone", "tandem", "ttft_p50_ms") == 4.0
    written = json.loads((tmp_path / "peers.json").read_text())
    (tmp_path / "peers.json").write_text(json.dumps({**written, "commit": "another"}))
    assert load(tmp_path / "peers.json").rounds == {}


def test_the_quick_sizes_let_a_stream_begin_before_the_burst() -> None:
    workload = plan("prefill", 1, QUICK)
    assert workload.burst_at_s is not None
    assert {ask.at_s for ask in workload.asks} == {0.0, workload.burst_at_s}
