"""`POST /v1/completions`."""

import time
from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from gateway.api.answers import answer
from gateway.api.bodies import read_body
from gateway.api.keys import REQUEST_ID
from gateway.engine import FinishReason
from gateway.schemas.completions import TextChoice, TextCompletion
from gateway.schemas.usage import Usage
from gateway.validation import parse_completion

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class CompletionShape:
    """Writes one text answer. `unused` stands for the usage of chunks that have none: null if the client asked."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    unused: UnsetType | None

    def opening(self) -> list[bytes]:
        """Return nothing: a text has no role."""
        return []

    def delta(self, text: str) -> bytes:
        """Return the chunk of more text."""
        return self._envelope((TextChoice(0, text),), self.unused)

    def ending(self, reason: FinishReason) -> bytes:
        """Return the last chunk of the choice."""
        return self._envelope((TextChoice(0, "", reason),), self.unused)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk that holds the usage."""
        return self._envelope((), usage)

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> bytes:
        """Return the answer that is not streamed."""
        return self._envelope((TextChoice(0, text, reason),), usage)

    def _envelope(self, choices: tuple[TextChoice, ...], usage: Usage | UnsetType | None) -> bytes:
        return _encode(
            TextCompletion(
                self.id, "text_completion", self.created, self.model, choices, self.system_fingerprint, usage
            )
        )


async def create_completion(http: web.Request) -> web.StreamResponse:
    """Continue a text."""
    request = parse_completion(await read_body(http))
    return await answer(
        http,
        request,
        lambda model: CompletionShape(
            id=f"cmpl-{http[REQUEST_ID]}",
            created=int(time.time()),
            model=model.card.model,
            system_fingerprint=model.system_fingerprint,
            unused=None if request.includes_usage else UNSET,
        ),
    )
