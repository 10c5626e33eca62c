"""What a job must respect to be computable on this decode worker. Callers other than our gateways are checked, too."""

from dataclasses import dataclass

from common.messages.codec import unpack_ids
from common.messages.job import Job
from common.messages.objections import objection_to_ids, objection_to_sampling

MAX_CHOICES = 128
"""OpenAI's bound of `n`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_sequences` choices are computed at a time, each with at most `max_context` tokens of the vocabulary."""

    vocab_size: int
    max_context: int
    max_sequences: int

    def objection(self, job: Job, prompt: bytes) -> str | None:
        """Return why a job with this prompt cannot run, or None. Raises `MalformedRecord` where ids are no ids."""
        ids = unpack_ids(prompt)
        if len(ids) != job.num_prompt_tokens or not ids:
            return f"{job.num_prompt_tokens} prompt tokens were announced, {len(ids)} came"
        return (
            self._objection_to_choices(job)
            or self._objection_to_shown(job, ids)
            or objection_to_sampling(job.sampling, self.vocab_size)
        )

    def _objection_to_choices(self, job: Job) -> str | None:
        numbers = [each.choice for each in job.choices]
        if not numbers or numbers != sorted(set(numbers)):
            return f"choices {numbers} are not some in ascending order"
        if not 0 <= numbers[0] <= numbers[-1] < MAX_CHOICES:
            return f"choices {numbers} are not below {MAX_CHOICES}"
        if len(numbers) > self.max_sequences:
            return f"{len(numbers)} choices exceed the {self.max_sequences} that the worker computes at a time"
        return None

    def _objection_to_shown(self, job: Job, prompt: list[int]) -> str | None:
        max_tokens = job.sampling.max_tokens
        for each in job.choices:
            shown = unpack_ids(each.shown)
            num_tokens = len(prompt) + len(shown)
            if num_tokens >= self.max_context:
                return f"{num_tokens} tokens leave no room in a context of {self.max_context}"
            if len(shown) >= max_tokens:
                return f"all {max_tokens} tokens were generated before: nothing is left to generate"
            objection = objection_to_ids(shown, self.vocab_size)
            if objection is not None:
                return objection
        return objection_to_ids(prompt, self.vocab_size)
