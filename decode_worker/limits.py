"""What a job must respect to be computable on this decode worker. Callers other than our gateways are checked, too."""

from collections.abc import Iterable
from dataclasses import dataclass

from common.messages.codec import unpack_ids
from common.messages.job import Job
from common.messages.sampling import SamplingParams

MAX_CHOICES = 128
"""OpenAI's bound of `n`."""

MAX_TOP_LOGPROBS = 20
"""OpenAI's bound of `top_logprobs`."""


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
            or self._objection_to_sampling(job.sampling)
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
            objection = self._objection_to_ids(shown)
            if objection is not None:
                return objection
        return self._objection_to_ids(prompt)

    def _objection_to_sampling(self, sampling: SamplingParams) -> str | None:
        for count in (sampling.num_logprobs, sampling.num_prompt_logprobs):
            if count is not None and not 0 <= count <= MAX_TOP_LOGPROBS:
                return f"{count} logprobs per token are not 0 to {MAX_TOP_LOGPROBS}"
        return self._objection_to_ids((*sampling.stop_ids, *(token for token, _ in sampling.logit_bias)))

    def _objection_to_ids(self, ids: Iterable[int]) -> str | None:
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        return None if outside is None else f"token id {outside} is outside the vocabulary of {self.vocab_size}"
