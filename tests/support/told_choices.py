"""What a client is told of each choice of its answer, chunk by chunk or at once, by either endpoint."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOLERANCE = 1e-3
"""Between logprobs of the same token that were computed in other batches, or by another worker."""


@dataclass(frozen=True)
class Scored:
    """A token with its logprob and those of the most likely tokens in its place. The first one of an echoed prompt has
    none."""

    token: str
    logprob: float | None
    top: Mapping[str, float]

    def is_like(self, other: "Scored") -> bool:
        """Whether both are the same up to rounding, which may also let the least likely alternatives change places."""
        if (self.token, len(self.top)) != (other.token, len(other.top)):
            return False
        if self.logprob is None or other.logprob is None:
            return self.logprob is other.logprob
        pairs = [(self.logprob, other.logprob), *zip(self._falling, other._falling, strict=True)]
        pairs += [(value, other.top[token]) for token, value in self.top.items() if token in other.top]
        return all(abs(one - another) < TOLERANCE for one, another in pairs)

    @property
    def _falling(self) -> list[float]:
        return sorted(self.top.values(), reverse=True)


@dataclass(eq=False)
class Told:
    """One choice. `finish` is the reason of its end, None before it."""

    text: str = ""
    finish: str | None = None
    scored: list[Scored] = field(default_factory=list)


@dataclass(eq=False)
class ToldChoices:
    """All `count` choices of one answer. `contradiction`: what the client was told that cannot be."""

    count: int
    contradiction: str = ""
    _told: list[Told] = field(init=False)

    def __post_init__(self) -> None:
        self._told = [Told() for _ in range(self.count)]

    def __getitem__(self, index: int) -> Told:
        return self._told[index]

    def __iter__(self) -> Iterator[Told]:
        return iter(self._told)

    @property
    def is_whole(self) -> bool:
        """Whether every choice is over."""
        return all(told.finish is not None for told in self._told)

    def take(self, event: Mapping[str, Any]) -> str:
        """Take a chunk or a whole answer; return the text that is new."""
        new = ""
        for choice in event["choices"]:
            if choice["index"] >= self.count:
                self.contradiction = f"{choice} was not asked for"
                continue
            told = self._told[choice["index"]]
            if told.finish is not None:
                self.contradiction = f"{choice} behind the last one"
            text = _text_of(choice)
            told.text += text
            told.scored += _scored(choice)
            told.finish = choice["finish_reason"] or told.finish
            new += text
        return new


def are_alike(told: Sequence[Scored], expected: Sequence[Scored]) -> bool:
    """Whether two answers have the same tokens with the same logprobs, up to rounding."""
    return len(told) == len(expected) and all(one.is_like(other) for one, other in zip(told, expected, strict=True))


def _text_of(choice: Mapping[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str(choice.get("delta", choice.get("message", {})).get("content") or "")


def _scored(choice: Mapping[str, Any]) -> list[Scored]:
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return []
    if "content" in logprobs:
        return [
            Scored(entry["token"], entry["logprob"], {top["token"]: top["logprob"] for top in entry["top_logprobs"]})
            for entry in logprobs["content"] or ()
        ]
    columns = (logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [Scored(token, logprob, top or {}) for token, logprob, top in zip(*columns, strict=True)]
