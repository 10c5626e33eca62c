"""Compiles a grammar within limits that hold wherever it is compiled: what a gateway admits no worker refuses."""

import time

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from common.errors import InvalidGrammar
from common.grammar.limits import MAX_GRAMMAR_BYTES

MAX_MESSAGE_CHARS = 500

MAX_MASK_S = 0.02
"""What the first mask may cost once it has been computed before. Masks are computed in the engine's steps, between all
others; usual ones take 2 to 20 us, but a{1000000} 50 ms at every token."""

_NUM_MASKS = 3
"""The best of so many is taken for the cost."""

_NO_TEXT = frozenset({"NoExtension", "NoExtensionBias"})
"""Complaints about a grammar that derives nothing."""

LIMITS = LLParserLimits(initial_lexer_fuel=200_000, verbose_errors=False)
"""Less fuel than the million of the library: it bounds what the lexer of one grammar may cost."""


def compile_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher that has consumed nothing, its first mask computed; raises `InvalidGrammar` saying why not.

    `grammar` is in llguidance's JSON form. Lets other threads run, and may take long: minutes for integers that are
    multiples of a large number. It may exhaust the stack as well, which ends the process, if rules refer to each other
    in a long chain. So strangers' grammars are compiled in a process that may be killed.
    """
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidGrammar(f"it takes more than {MAX_GRAMMAR_BYTES} bytes")
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    _check(matcher)
    mask = matcher.compute_bitmask()
    _check(matcher)
    if matcher.validate_tokens([_lowest(mask)]) != 1:  # where single characters are no tokens
        raise InvalidGrammar("the model's vocabulary cannot spell what must come first")
    if min(_mask_cost_s(matcher) for _ in range(_NUM_MASKS)) > MAX_MASK_S:
        raise InvalidGrammar("it is too expensive to follow")
    return matcher


def complaint_of(matcher: LLMatcher) -> str:
    """Return what the matcher has against its grammar or its tokens, "" if nothing. May quote the grammar."""
    return matcher.get_error().partition("\n<")[0].strip()[:MAX_MESSAGE_CHARS]


def _check(matcher: LLMatcher) -> None:
    if not matcher.is_error():
        return
    complaint = complaint_of(matcher) or "it cannot be compiled"
    raise InvalidGrammar("no text can match it" if complaint in _NO_TEXT else complaint)


def _lowest(mask: bytes) -> int:
    """Return the lowest token that a mask with any allows."""
    bits = int.from_bytes(mask, "little")
    return (bits & -bits).bit_length() - 1


def _mask_cost_s(matcher: LLMatcher) -> float:
    started = time.thread_time()
    matcher.compute_bitmask()
    return time.thread_time() - started
