"""`POST /v1/chat/completions`."""

import time
from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from gateway.api.answers import answer
from gateway.api.bodies import read_body
from gateway.api.keys import REQUEST_ID
from gateway.engine import FinishReason
from gateway.schemas.chat import AnswerMessage, ChatChoice, ChatChunk, ChatCompletion, ChunkChoice, Delta
from gateway.schemas.usage import Usage
from gateway.validation import parse_chat

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Writes one chat answer. `unused` stands for the usage of chunks that have none: null if the client asked."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    unused: UnsetType | None

    def opening(self) -> list[bytes]:
        """Return the chunk that names the role."""
        return [self._chunk(Delta(role="assistant", content=""))]

    def delta(self, text: str) -> bytes:
        """Return the chunk of more text."""
        return self._chunk(Delta(content=text))

    def ending(self, reason: FinishReason) -> bytes:
        """Return the last chunk of the choice."""
        return self._chunk(Delta(), reason)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk that holds the usage."""
        return self._envelope((), usage)

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> bytes:
        """Return the answer that is not streamed."""
        choice = ChatChoice(0, AnswerMessage("assistant", text), reason)
        return _encode(
            ChatCompletion(
                self.id, "chat.completion", self.created, self.model, (choice,), usage, self.system_fingerprint
            )
        )

    def _chunk(self, delta: Delta, reason: FinishReason | None = None) -> bytes:
        return self._envelope((ChunkChoice(0, delta, reason),), self.unused)

    def _envelope(self, choices: tuple[ChunkChoice, ...], usage: Usage | UnsetType | None) -> bytes:
        return _encode(
            ChatChunk(
                self.id, "chat.completion.chunk", self.created, self.model, choices, self.system_fingerprint, usage
            )
        )


async def create_chat_completion(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    request = parse_chat(await read_body(http))
    return await answer(
        http,
        request,
        lambda model: ChatShape(
            id=f"chatcmpl-{http[REQUEST_ID]}",
            created=int(time.time()),
            model=model.card.model,
            system_fingerprint=model.system_fingerprint,
            unused=None if request.includes_usage else UNSET,
        ),
    )
