"""What a task and the answer to its claim must respect to be computable here. Their author has checked its job, but a
broken or foreign one must not end this process."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.messages.job import PrefillTask
from common.messages.objections import objection_to_ids, objection_to_sampling


@dataclass(frozen=True, slots=True)
class Limits:
    """A sequence has at most `max_context` tokens, each of them one of the vocabulary's `vocab_size`."""

    vocab_size: int
    max_context: int

    def objection(self, task: PrefillTask, ids: Sequence[int]) -> str | None:
        """Return why a task cannot be computed whose author answered with `ids`, None if it can."""
        if not 0 < task.num_prompt_tokens <= len(ids):
            return f"{task.num_prompt_tokens} prompt tokens were announced, {len(ids)} came"
        if len(ids) > self.max_context:
            return f"{len(ids)} tokens exceed a context of {self.max_context}"
        return objection_to_ids(ids, self.vocab_size) or objection_to_sampling(task.sampling, self.vocab_size)
