"""What is told of each sequence of a decode scheduler: its next tokens, and its end. A part of the scheduler."""

import msgspec

from common.messages.chain import extend_chain
from common.messages.logprobs import TokenLogprobs
from common.scheduling.blocks import SequenceBlocks
from common.scheduling.emission import Emission, FailureCode
from common.scheduling.sequence import FinishReason, Sequence
from decode_worker.first_token import FirstToken
from decode_worker.queues import Queues
from decode_worker.ticket import Ticket


class Teller:
    """Appends tokens to sequences and ends them; one that has `max_tokens_held` tokens has come to its end."""

    def __init__(self, blocks: SequenceBlocks, queues: Queues, max_tokens_held: int) -> None:
        self._blocks = blocks
        self._queues = queues
        self._max_tokens_held = max_tokens_held

    def append_first(self, ticket: Ticket, first: FirstToken) -> Emission:
        """Append a token that another worker has sampled."""
        choices = ticket.choices
        num_cached = min(first.num_cached, ticket.sequence.num_prompt)  # there may also be what earlier ones have shown
        choices.num_cached = max(choices.num_cached, num_cached)
        ticket.sequence.prompt_logprobs = list(first.prompt_logprobs)
        return self.append(ticket, first.token, first.logprobs)

    def append(self, ticket: Ticket, token: int, logprobs: TokenLogprobs | None) -> Emission:
        """Append a token. If the sequence is over with it, its pages are released."""
        sequence = ticket.sequence
        finish = self.finish(sequence, token)
        emission = Emission(
            sequence.key,
            sequence.num_generated,
            (token,),
            ticket.chain,
            finish=finish,
            num_cached=ticket.choices.num_cached,
            logprobs=() if logprobs is None else (logprobs,),
            prompt_logprobs=_take_prompt_logprobs(sequence),
        )
        sequence.token_ids.append(token)
        ticket.chain = extend_chain(ticket.chain, token)
        if finish is not None:
            self.leave(ticket)
        return emission

    def finish(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Return why the sequence is over with `token`, if it is."""
        sampling = sequence.sampling
        if token in sampling.stop_ids:
            return FinishReason.STOP
        if sequence.num_generated + 1 >= sampling.max_tokens or sequence.num_tokens + 1 >= self._max_tokens_held:
            return FinishReason.LENGTH
        return None

    def fail(self, ticket: Ticket, failure: FailureCode) -> Emission:
        """End a sequence. The other choices of its request must end, too."""
        sequence, num_cached = ticket.sequence, ticket.choices.num_cached
        self.leave(ticket)
        return Emission(sequence.key, sequence.num_generated, (), ticket.chain, failure=failure, num_cached=num_cached)

    def leave(self, ticket: Ticket) -> None:
        """Release the pages of a sequence that is over, or not wanted any more."""
        self._blocks.release(ticket.sequence)
        self._queues.leave(ticket)


def _take_prompt_logprobs(sequence: Sequence) -> tuple[TokenLogprobs, ...]:
    """Return the logprobs of the prompt, once: from then on nobody asks for them."""
    if sequence.sampling.num_prompt_logprobs is None:
        return ()
    taken = tuple(sequence.prompt_logprobs)
    sequence.prompt_logprobs = []
    sequence.sampling = msgspec.structs.replace(sequence.sampling, num_prompt_logprobs=None)
    return taken
