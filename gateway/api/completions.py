"""`POST /v1/completions`."""

from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import UnsetType

from gateway.api.answers import Endpoint, answer
from gateway.api.bodies import read_body
from gateway.api.heading import Heading
from gateway.engine import FinishReason
from gateway.schemas.completions import TextChoice, TextCompletion
from gateway.schemas.usage import Usage
from gateway.validation import parse_completion

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """Writes one text answer."""

    heading: Heading

    def opening(self) -> list[bytes]:
        """Return nothing: a text has no role."""
        return []

    def delta(self, text: str) -> bytes:
        """Return the chunk of more text."""
        return self._envelope((TextChoice(0, text),), self.heading.unused)

    def ending(self, reason: FinishReason) -> bytes:
        """Return the last chunk of the choice."""
        return self._envelope((TextChoice(0, "", reason),), self.heading.unused)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk that holds the usage."""
        return self._envelope((), usage)

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> bytes:
        """Return the answer that is not streamed."""
        return self._envelope((TextChoice(0, text, reason),), usage)

    def _envelope(self, choices: tuple[TextChoice, ...], usage: Usage | UnsetType | None) -> bytes:
        head = self.heading
        return _encode(
            TextCompletion(
                head.id, "text_completion", head.created, head.model, choices, head.system_fingerprint, usage
            )
        )


async def create_completion(http: web.Request) -> web.StreamResponse:
    """Continue a text."""
    return await answer(http, parse_completion(await read_body(http)), Endpoint("cmpl", CompletionShape))
