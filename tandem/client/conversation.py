"""One chat: its history, and the answer that is being streamed."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from tandem.client.gateway_client import GatewayClient

Message = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How answers are generated; None leaves a value to the gateway."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


class Conversation:
    """Owns the messages exchanged so far."""

    def __init__(self, client: GatewayClient, options: ChatOptions, system: str | None) -> None:
        self._client = client
        self._options = options
        self._system = system
        self.messages: list[Message] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    async def ask(self, question: str, show: Callable[[str], None]) -> None:
        """Stream the answer into `show` and remember it.

        A failure forgets the question; a cancelled answer is remembered as far as it was shown.
        """
        history = [*self.messages, {"role": "user", "content": question}]
        shown: list[str] = []
        try:
            async with aclosing(self._client.stream("/v1/chat/completions", self._body(history))) as chunks:
                async for chunk in chunks:
                    text = _text_of(chunk)
                    shown.append(text)
                    show(text)
        finally:
            if shown:
                self.messages = [*history, {"role": "assistant", "content": "".join(shown)}]

    def _body(self, messages: list[Message]) -> dict[str, object]:
        options = self._options
        chosen = {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "max_tokens": options.max_tokens,
            "seed": options.seed,
        }
        given = {name: value for name, value in chosen.items() if value is not None}
        return {"model": options.model, "messages": messages, **given}


def _text_of(chunk: dict[str, Any]) -> str:
    choices = chunk.get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""
