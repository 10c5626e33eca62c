"""Tokens and their logprobs as the OpenAI API writes them: as a list of objects for chats, as four lists for texts.

A token that is no whole text is written as its bytes: `\\xe6\\x97`, and `bytes:\\xe6\\x97` where its name must be
unlike any text's. The bytes themselves are in `bytes`.
"""

from collections.abc import Sequence

from common.messages.logprobs import TokenLogprobs
from gateway.schemas.chat import ChatLogprobs, TokenLogprob, TopLogprob
from gateway.schemas.completions import TextLogprobs
from gateway.text_stream import AnswerToken
from gateway.tokenizer import ModelTokenizer

IMPOSSIBLE = -9999.0
"""What stands for -inf, which JSON cannot say."""


def chat_logprobs(tokens: Sequence[AnswerToken], tokenizer: ModelTokenizer) -> ChatLogprobs:
    """Return the logprobs of generated tokens."""
    return ChatLogprobs([_chat_token(token, tokenizer) for token in tokens])


def text_logprobs(tokens: Sequence[AnswerToken], tokenizer: ModelTokenizer) -> TextLogprobs:
    """Return the logprobs of tokens; the first one of a prompt has none."""
    return TextLogprobs(
        tokens=[text_name(tokenizer.bytes_of(token.token_id)) for token in tokens],
        token_logprobs=[None if token.logprobs is None else finite(token.logprobs.logprob) for token in tokens],
        top_logprobs=[
            None if token.logprobs is None else _alternatives(token.token_id, token.logprobs, tokenizer)
            for token in tokens
        ],
        text_offset=[token.offset for token in tokens],
    )


def chat_name(token: bytes) -> str:
    """Return a token as text, or its bytes as escapes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return _escapes(token)


def text_name(token: bytes) -> str:
    """Return a token as text, or as bytes in a form that is unlike the text of any other token."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return f"bytes:{_escapes(token)}"


def finite(logprob: float) -> float:
    """Return a logprob as clients are told it."""
    return max(logprob, IMPOSSIBLE)


def _escapes(token: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in token)


def _chat_token(token: AnswerToken, tokenizer: ModelTokenizer) -> TokenLogprob:
    assert token.logprobs is not None  # chats echo nothing, and every generated token has them
    own = tokenizer.bytes_of(token.token_id)
    top = [_top(tokenizer.bytes_of(token_id), logprob) for token_id, logprob in token.logprobs.top]
    return TokenLogprob(chat_name(own), finite(token.logprobs.logprob), list(own), top)


def _top(token: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(chat_name(token), finite(logprob), list(token))


def _alternatives(token_id: int, logprobs: TokenLogprobs, tokenizer: ModelTokenizer) -> dict[str, float]:
    """Return the likeliest tokens and the token itself. Of tokens with the same text the likeliest stands for all."""
    found: dict[str, float] = {}
    for other_id, logprob in (*logprobs.top, (token_id, logprobs.logprob)):
        found.setdefault(text_name(tokenizer.bytes_of(other_id)), finite(logprob))
    return found
