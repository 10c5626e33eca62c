"""A prompt as the beginning of its answers (`echo` of the completions API)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from common.errors import GenerationFailed
from common.messages.logprobs import TokenLogprobs
from gateway.served_models import ServedModel
from gateway.text_stream import AnswerToken
from gateway.validation import Prompt, TextPrompt


@dataclass(frozen=True, slots=True)
class Echo:
    """`text` is what the client sees of the prompt, `token_ids` are its tokens, each with the `offsets` of its text."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]

    def tokens(self, logprobs: Sequence[TokenLogprobs], *, has_logprobs: bool) -> Iterator[AnswerToken]:
        """Yield the prompt's tokens; `logprobs` are those from the second one on, if the client wants any."""
        if has_logprobs and len(logprobs) != len(self.token_ids) - 1:
            raise GenerationFailed(f"{len(logprobs)} logprobs for the {len(self.token_ids)} tokens of the prompt.")
        known: Iterable[TokenLogprobs | None] = chain((None,), logprobs) if has_logprobs else repeat(None)
        return map(AnswerToken, self.token_ids, self.offsets, known)


def echo_of(
    prompt: Prompt, token_ids: Sequence[int], model: ServedModel, *, skips_special: bool, has_tokens: bool
) -> Echo:
    """Return the echo of a prompt: a text as the client wrote it, ids decoded. Offsets are needed for `has_tokens`."""
    if isinstance(prompt, TextPrompt):
        text, skips_special = prompt.text, False
    else:
        text = model.tokenizer.decode(token_ids, skips_special=skips_special)
    return Echo(text, token_ids, _offsets(token_ids, model, skips_special) if has_tokens else ())


def _offsets(token_ids: Sequence[int], model: ServedModel, skips_special: bool) -> list[int]:
    detokenizer = model.tokenizer.detokenizer(skips_special=skips_special)
    written = model.tokenizer.without_bos(token_ids)
    offsets = [0] * (len(token_ids) - len(written))
    place = 0
    for token_id in written:
        offsets.append(place)
        place += len(detokenizer.push((token_id,)))
    return offsets
