"""What requests are expected to cost their tenants' fair shares, and by how much that was wrong when they ended.

A job is charged when it is given to a worker, by an estimate: its prompt and as many tokens as answers have of late.
The difference travels with the gateway's next heartbeat. Corrections that are lost with a Redis that is away are not
repeated: made twice they would be worse than missing.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

from common.messages.ids import ModelName, TenantId
from gateway.streams import Stream

FIRST_GUESS_TOKENS = 256.0
"""Length of an answer while none has been seen."""

SMOOTHING = 0.02
"""Weight of the newest answer in the mean; about the last fifty count."""


class Charges:
    """Of one gateway, all its models."""

    def __init__(self) -> None:
        self._mean_tokens: dict[ModelName, float] = {}
        self._corrections: defaultdict[ModelName, Counter[TenantId]] = defaultdict(Counter)

    def expected(self, stream: Stream) -> int:
        """Return how many tokens the request is expected to take, prompt and answers."""
        request = stream.request
        mean_tokens = self._mean_tokens.get(request.model, FIRST_GUESS_TOKENS)
        per_choice = min(float(request.sampling.max_tokens), mean_tokens)
        return len(request.prompt_ids) + round(request.num_choices * per_choice)

    def settle(self, stream: Stream) -> None:
        """The request is over: correct what it was charged for, if it was."""
        request, cost = stream.request, stream.cost
        if cost is None or not stream.was_given:
            return
        nums_generated = [len(choice.shown) for choice in stream.choices.all]
        difference = len(request.prompt_ids) + sum(nums_generated) - cost
        if difference:
            self._corrections[request.model][request.tenant] += difference
        for num_generated in nums_generated:
            mean_tokens = self._mean_tokens.get(request.model, FIRST_GUESS_TOKENS)
            self._mean_tokens[request.model] = mean_tokens + SMOOTHING * (num_generated - mean_tokens)

    def take(self, model: ModelName) -> Mapping[TenantId, int]:
        """Return the corrections since the last time."""
        return self._corrections.pop(model, Counter())
