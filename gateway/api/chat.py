"""`POST /v1/chat/completions`."""

from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import UnsetType

from gateway.api.answers import Endpoint, answer
from gateway.api.bodies import read_body
from gateway.api.heading import Heading
from gateway.engine import FinishReason
from gateway.schemas.chat import AnswerMessage, ChatChoice, ChatChunk, ChatCompletion, ChunkChoice, Delta
from gateway.schemas.usage import Usage
from gateway.validation import parse_chat

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ChatShape:
    """Writes one chat answer."""

    heading: Heading

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
        head = self.heading
        choice = ChatChoice(0, AnswerMessage("assistant", text), reason)
        return _encode(
            ChatCompletion(
                head.id, "chat.completion", head.created, head.model, (choice,), usage, head.system_fingerprint
            )
        )

    def _chunk(self, delta: Delta, reason: FinishReason | None = None) -> bytes:
        return self._envelope((ChunkChoice(0, delta, reason),), self.heading.unused)

    def _envelope(self, choices: tuple[ChunkChoice, ...], usage: Usage | UnsetType | None) -> bytes:
        head = self.heading
        return _encode(
            ChatChunk(
                head.id, "chat.completion.chunk", head.created, head.model, choices, head.system_fingerprint, usage
            )
        )


async def create_chat_completion(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    return await answer(http, parse_chat(await read_body(http)), Endpoint("chatcmpl", ChatShape))
