"""The two records that travel through Redis: a job for a decode worker and a prefill task for any prefill worker.

`traceparent` and `tracestate` (W3C Trace Context) name the gateway's span, the parent of what workers record.
"""

import msgspec

from common.messages.ids import (
    ANYBODY,
    FIRST_CHOICE,
    ChoiceIndex,
    Epoch,
    Fingerprint,
    GatewayId,
    ModelName,
    PlacementNumber,
    RequestId,
    TenantId,
    TryNumber,
    WorkerId,
)
from common.messages.sampling import SamplingParams

SUSPECT_DEATHS = 2
"""A request over which so many workers died or stalled may be the cause: it runs alone from then on, so that its third
victim, if there is one, takes nobody else's requests with it."""


class OpenChoice(msgspec.Struct, frozen=True):
    """A choice that has not ended. `shown` holds the ids (`pack_ids`) that the client already has of it: they are
    continued, never sampled again."""

    choice: ChoiceIndex
    shown: bytes = b""


class Job(msgspec.Struct, frozen=True, tag="job", tag_field="kind"):
    """One placement of a request, addressed to one decode worker.

    `prompt` holds the token ids of the prompt (`pack_ids`), or None when they are too many for Redis and travel from
    the gateway on acceptance. `choices` names those that are still to be generated, at least one, in ascending order.
    `num_prompt_tokens` counts the prompt alone.

    `time_left_s` is what was left until the request's deadline when it was placed, None without one: durations travel,
    not clock times. `num_deaths` counts the processes that died or stalled over the request so far; one that
    `runs_alone` saw so many that it is computed beside nobody else.

    `priority` (higher is sooner), `tenant` (whose fair share it is) and `age_s` (since the request came to its gateway)
    order the waiting jobs. `cost` is how many tokens it is expected to take, which its tenant's share is charged for;
    None: as many as it may; a tenant of twice the `weight` gets twice the share. `fingerprint` is the only version
    of the model that may answer, None: any.
    """

    request: RequestId
    placement: PlacementNumber
    gateway: GatewayId
    model: ModelName
    num_prompt_tokens: int
    sampling: SamplingParams
    prompt: bytes | None = None
    choices: tuple[OpenChoice, ...] = (OpenChoice(FIRST_CHOICE),)
    cache_salt: str = ""
    traceparent: str = ""
    tracestate: str = ""
    time_left_s: float | None = None
    runs_alone: bool = False
    num_deaths: int = 0
    tenant: TenantId = ANYBODY
    priority: int = 0
    cost: int | None = None
    age_s: float = 0.0
    fingerprint: Fingerprint | None = None
    weight: float = 1.0


class PrefillTask(msgspec.Struct, frozen=True, tag="prefill_task", tag_field="kind"):
    """An offer to prefill one sequence, published by the decode worker that has reserved the pages for it.

    The ids are not here: the claimer receives them when it binds. `num_tokens` counts prompt and shown tokens; the
    token to sample has index `num_tokens - num_prompt_tokens` among the generated ones of `choice`.
    """

    request: RequestId
    placement: PlacementNumber
    try_number: TryNumber
    author: WorkerId
    author_epoch: Epoch
    gateway: GatewayId
    num_tokens: int
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str = ""
    traceparent: str = ""
    tracestate: str = ""
    choice: ChoiceIndex = FIRST_CHOICE
