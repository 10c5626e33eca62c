"""Where a canary can be sent: the decode workers of all models, as the registry and the feeds show them now."""

from dataclasses import dataclass

from common.messages.ids import Fingerprint, ModelName
from common.messages.registry import ModelCard, Role, WorkerState
from gateway.roster import ModelView, Roster, source_of
from gateway.streams import Source

NUM_BLOCKS = 2
"""Whole blocks of a canary's prompt: what is handed over is more than one page."""

NUM_IDS = 256
"""Ids below are in every vocabulary, also in that of another version of the model than the card's."""

NUM_TOKENS = 2
"""What a canary generates: the first comes from the prefill, the second needs the transfer and a step of decoding."""


@dataclass(frozen=True, slots=True)
class CanaryTarget:
    """A decode worker as the registry lists it now.

    `num_queued` counts sequences that wait for room or for their prefill, `num_steps` its engine's steps,
    `num_prefill_steps` those of all prefill workers that could work for it.
    """

    source: Source
    model: ModelName
    fingerprint: Fingerprint
    is_serving: bool
    num_prompt_tokens: int
    num_ids: int
    num_queued: int
    num_steps: int
    num_prefill_steps: int


def list_targets(roster: Roster) -> list[CanaryTarget]:
    """Return every decode worker of a model that can be served, whether or not it serves just now."""
    views = [view for model in roster.models if (view := roster.view(model)) is not None]
    serving = {source_of(state) for model in roster.models for state in roster.serving_workers(model)}
    return [
        _target(view, view.card, state, is_serving=source_of(state) in serving)
        for view in views
        if view.card is not None
        for state in view.workers
        if state.record.role is Role.DECODE
    ]


def _target(view: ModelView, card: ModelCard, state: WorkerState, *, is_serving: bool) -> CanaryTarget:
    record = state.record
    room = min(record.max_context, record.num_blocks * record.block_size) - NUM_TOKENS
    prefill_steps = [
        other.load.num_steps
        for other in view.workers
        if other.record.role is Role.PREFILL and other.record.fingerprint == record.fingerprint
    ]
    return CanaryTarget(
        source=source_of(state),
        model=record.model,
        fingerprint=record.fingerprint,
        is_serving=is_serving,
        num_prompt_tokens=max(1, min(NUM_BLOCKS * record.block_size + 1, room)),
        num_ids=min(card.vocab_size, NUM_IDS),
        num_queued=state.load.num_waiting + state.load.num_reserved,
        num_steps=state.load.num_steps,
        num_prefill_steps=sum(prefill_steps),
    )
