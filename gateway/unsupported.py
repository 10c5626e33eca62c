"""Known request fields that this version does not serve, and the values of them that ask for nothing.

A known field that would change the answer is refused, never ignored; an unknown field is ignored with a log entry.
"""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import msgspec

from common.errors import InvalidRequest
from gateway.body import decode_field
from gateway.schemas.responses import LOGPROBS


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field is refused unless its value is one of `harmless` (null always is)."""

    reason: str = "is not supported yet"
    harmless: tuple[Any, ...] = ()

    def admits(self, value: object) -> bool:
        """Whether the value asks for nothing. Compares types too: False is not 0."""
        return any(type(value) is type(other) and value == other for other in self.harmless)


NOT_YET = Refusal()
RESERVED = Refusal("is decided by the server, not by the request")
OFF = Refusal(harmless=(False,))
EMPTY = Refusal(harmless=([], {}, ""))

_SHARED: Mapping[str, Refusal] = {
    "use_beam_search": OFF,
    "length_penalty": Refusal(harmless=(1, 1.0)),
    "prompt_logprobs": NOT_YET,
    "spaces_between_special_tokens": Refusal(harmless=(True,)),
    "truncate_prompt_tokens": NOT_YET,
    "allowed_token_ids": EMPTY,
    "bad_words": EMPTY,
    "logits_processors": EMPTY,
    "add_special_tokens": RESERVED,
    "guided_decoding_backend": Refusal("has nothing to choose from", harmless=("auto", "guidance")),
    "guided_whitespace_pattern": Refusal("is decided by the server, not by the request"),
    "chat_template": RESERVED,
    "chat_template_args": RESERVED,
    "tokenizer": RESERVED,
    "tokenize": RESERVED,
    "extra_body": Refusal("belongs into the client library: its content goes to the top level of the body"),
}

CHAT_REFUSED: Mapping[str, Refusal] = {
    **_SHARED,
    "best_of": Refusal("is for `/v1/completions`; send `n`", harmless=(1,)),
    "functions": EMPTY,
    "function_call": Refusal(harmless=("none", "auto")),
    "modalities": Refusal(harmless=(["text"],)),
    "audio": NOT_YET,
    "prediction": NOT_YET,
    "verbosity": NOT_YET,
    "web_search_options": NOT_YET,
    "store": OFF,
    "echo": OFF,
    "continue_final_message": OFF,
    "add_generation_prompt": RESERVED,
    "documents": RESERVED,
    "thinking": NOT_YET,
}

COMPLETION_REFUSED: Mapping[str, Refusal] = {
    **_SHARED,
    "suffix": Refusal("is not supported: the model continues texts, it does not fill gaps", harmless=("",)),
    "top_logprobs": Refusal("is for `/v1/chat/completions`; send `logprobs: <number>`"),
    "max_completion_tokens": Refusal("is for `/v1/chat/completions`; send `max_tokens`"),
    "prompt_embeds": NOT_YET,
    "chat_template_kwargs": Refusal("has no meaning without messages", harmless=({},)),
}

RESPONSE_REFUSED: Mapping[str, Refusal] = {
    **_SHARED,
    "previous_response_id": Refusal(
        "cannot be served: responses are not stored; send the whole conversation in `input`"
    ),
    "conversation": Refusal("cannot be served: nothing is stored; send the whole conversation in `input`"),
    "prompt": Refusal("cannot be served: no prompts are stored; send `instructions` and `input`"),
    "background": Refusal("cannot be served: responses are not stored", harmless=(False,)),
    "context_management": EMPTY,
    "truncation": Refusal("is not done by the server", harmless=("disabled",)),
    "max_tool_calls": Refusal("is for tools of the server's own; there are none"),
    "moderation": NOT_YET,
    "n": Refusal("is for `/v1/completions` and `/v1/chat/completions`", harmless=(1,)),
    "max_tokens": Refusal("is called `max_output_tokens` here"),
    "max_completion_tokens": Refusal("is called `max_output_tokens` here"),
    "messages": Refusal("is called `input` here"),
    "response_format": Refusal("is called `text.format` here"),
    "reasoning_effort": Refusal("is called `reasoning.effort` here"),
    "logprobs": Refusal(f'is asked for by "{LOGPROBS}" in `include` here', harmless=(False,)),
    "return_token_ids": OFF,
    "guided_json": Refusal("is called `text.format` here"),
    "guided_regex": NOT_YET,
    "guided_choice": NOT_YET,
    "guided_grammar": NOT_YET,
    "structured_outputs": Refusal("is called `text.format` here"),
    "documents": RESERVED,
    "add_generation_prompt": RESERVED,
}

TOKENIZE_REFUSED: Mapping[str, Refusal] = {
    "add_generation_prompt": Refusal("is decided by the server, not by the request", harmless=(True,)),
    "continue_final_message": OFF,
    "chat_template": RESERVED,
    "mm_processor_kwargs": EMPTY,
    "documents": EMPTY,
}

WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
)
"""Known fields that never change an answer: accepted in silence."""


class FieldPolicy:
    """What one endpoint does with each top-level field."""

    def __init__(self, served: AbstractSet[str], refused: Mapping[str, Refusal] | None = None) -> None:
        """`refused` None: it knows nothing that it does not serve."""
        self._refused = refused or {}
        self._known = frozenset(served).union(self._refused, WITHOUT_EFFECT)

    def refuse(self, fields: dict[str, msgspec.Raw]) -> None:
        """Raise `InvalidRequest` for the first field that asks for something we do not serve."""
        if self._refused.keys().isdisjoint(fields):
            return
        for name in fields:
            refusal = self._refused.get(name)
            if refusal is None:
                continue
            value = decode_field(fields, name)
            if value is not None and not refusal.admits(value):
                raise InvalidRequest(f"`{name}` {refusal.reason}.", param=name, code="unsupported_parameter")

    def unknown(self, names: Collection[str]) -> list[str]:
        """Return the names that nobody knows, sorted."""
        return [] if self._known.issuperset(names) else sorted(set(names) - self._known)
