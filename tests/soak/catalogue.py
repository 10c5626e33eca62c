"""What the clients of a soak ask for, and what each of them must get: computed by the cluster itself, undisturbed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.exchange import Answer, Exchange
from tests.support.fault_client import MODEL, completion

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
NUM_SHARED = 480
"""Tokens that several prompts begin with: 30 blocks, 15 chunks."""

STOPS_AT = 12
"""In the middle of which token of its free answer the stop string of an entry begins."""

COMPUTE_S = 120.0


class NotTheSame(AssertionError):
    """The cluster answers the same question in two ways though nothing disturbs it."""


@dataclass(frozen=True)
class Entry:
    """One question."""

    name: str
    path: str
    body: Mapping[str, Any]

    @property
    def streams(self) -> bool:
        """Whether the answer comes piece by piece."""
        return bool(self.body.get("stream"))


def entries() -> list[Entry]:
    """Return all questions; that of the stop string has none yet."""
    return [Entry(name, COMPLETIONS, body) for name, body in _completions()] + [
        Entry(name, CHAT, body) for name, body in _chats()
    ]


@dataclass(frozen=True)
class Catalogue:
    """Questions with the answers that undisturbed clients get."""

    entries: tuple[Entry, ...]
    answers: Mapping[str, Answer]

    async def verify(self, url: str) -> None:
        """Ask everything again, one after the other; raise `NotTheSame` if an answer has changed."""
        for entry in self.entries:
            answer = await _answer(url, entry)
            if answer != self.answers[entry.name] or not answer.is_scored_like(self.answers[entry.name]):
                raise NotTheSame(f"{entry.name}:\nfirst {self.answers[entry.name]}\nnow   {answer}")


async def compute(url: str) -> Catalogue:
    """Ask everything, one after the other, then once more over warm prefix caches. Raises `NotTheSame`."""
    answers: dict[str, Answer] = {}
    asked = []
    for free in entries():
        answer = await _answer(url, free)
        entry = free
        if "stop" in free.body:
            entry = Entry(free.name, free.path, {**free.body, "stop": _stop_string(answer.text)})
            full, answer = answer, await _answer(url, entry)
            if answer.finish_reason != "stop" or not full.text.startswith(answer.text):
                raise NotTheSame(f"{entry.name}: {answer} is not the beginning of {full}")
        asked.append(entry)
        answers[entry.name] = answer
    catalogue = Catalogue(tuple(asked), answers)
    await catalogue.verify(url)
    return catalogue


def _completions() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and bodies; chunks have 32 tokens, blocks 16."""
    yield "one token", completion(11, 30, max_tokens=1, temperature=0)
    yield "one token of a long prompt", completion(12, 700, max_tokens=1, temperature=0, stream=True)
    yield "two tokens", completion(13, 90, max_tokens=2, temperature=1.0, seed=3, stream=True)
    yield "greedy", completion(14, 70, max_tokens=40, temperature=0, stream=True)
    yield "greedy, not streamed", completion(15, 45, max_tokens=50, temperature=0)
    yield "seeded", completion(16, 100, max_tokens=60, temperature=0.9, top_p=0.9, seed=5, stream=True)
    yield "seeded, not streamed", completion(17, 160, max_tokens=30, temperature=1.1, top_k=40, seed=9)
    yield (
        "penalties",
        completion(
            18, 100, max_tokens=60, temperature=0.8, seed=11, presence_penalty=0.6, repetition_penalty=1.1, stream=True
        ),
    )
    yield "penalties, not streamed", completion(19, 230, max_tokens=40, temperature=0, frequency_penalty=0.5)
    yield "stop string", completion(20, 170, max_tokens=60, temperature=0, stream=True, stop=[])
    yield "stop string, not streamed", completion(21, 40, max_tokens=60, temperature=0.7, seed=4, stop=[])
    yield "long prompt", completion(22, 1200, max_tokens=30, temperature=0, stream=True)
    yield "long prompt, not streamed", completion(23, 900, max_tokens=12, temperature=0.9, seed=21)
    yield "longest prompt", completion(24, 1900, max_tokens=8, temperature=0, stream=True)
    yield "long answer", completion(25, 60, max_tokens=300, temperature=0.9, seed=2, stream=True)
    for number, num_own in enumerate((3, 40, 200)):
        yield f"shared prefix {number}", _branch(30 + number, num_own, max_tokens=25, temperature=0, stream=number > 0)
    yield "three choices", completion(26, 110, max_tokens=40, temperature=1.0, seed=13, n=3, stream=True)
    yield "two choices, not streamed", completion(27, 64, max_tokens=30, temperature=0.8, seed=14, n=2)
    yield "best of three", completion(28, 75, max_tokens=20, temperature=1.0, seed=15, best_of=3)
    yield "logprobs", completion(31, 130, max_tokens=40, temperature=0.9, seed=16, logprobs=5, stream=True)
    yield "logprobs of two choices", completion(32, 80, max_tokens=20, temperature=1.0, seed=17, n=2, logprobs=1)
    yield "echo", completion(33, 95, max_tokens=10, temperature=0, logprobs=2, echo=True)
    for salt in ("a", "b"):
        yield f"salt {salt}", _branch(30, 3, max_tokens=20, temperature=0, cache_salt=salt, stream=True)


def _branch(first: int, num_own: int, **fields: Any) -> dict[str, Any]:
    """Return a body whose prompt begins like that of others."""
    body = completion(first, num_own, **fields)
    return body | {"prompt": completion(29, NUM_SHARED)["prompt"] + body["prompt"]}


def _chats() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "chat", _chat([_words(41, 30)], max_tokens=30, temperature=0, stream=True)
    yield "chat, not streamed", _chat([_words(42, 60)], max_tokens=40, temperature=1.0, seed=8)
    turns = [_words(43, 200), _words(44, 40), _words(45, 120)]
    yield "chat of several turns", _chat(turns, max_tokens=35, temperature=0.8, seed=6, stream=True)
    yield "chat of two choices", _chat([_words(47, 70)], max_tokens=25, temperature=1.0, seed=18, n=2, stream=True)
    yield (
        "chat with logprobs",
        _chat([_words(48, 50)], max_tokens=25, temperature=0, logprobs=True, top_logprobs=4, stream=True),
    )
    yield "chat, one token", _chat([_words(46, 90)], max_tokens=1, temperature=0)


def _chat(turns: list[str], **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "assistant" if number % 2 else "user", "content": content} for number, content in enumerate(turns)
    ]
    return {"model": MODEL, "messages": messages, "ignore_eos": True} | fields


def _words(first: int, num_tokens: int) -> str:
    return "".join(f"{token} " for token in completion(first, num_tokens)["prompt"])


def _stop_string(text: str) -> str:
    """Return what stands from the last digit of one token to the first of the one after the next."""
    tokens = text.split()[STOPS_AT : STOPS_AT + 3]
    return f"{tokens[0][-1]} {tokens[1]} {tokens[2][0]}"


async def _answer(url: str, entry: Entry) -> Answer:
    exchange = Exchange(url, entry.path, entry.body)
    result = await exchange.start().over(COMPUTE_S)
    if not isinstance(result, Answer):
        raise NotTheSame(f"{entry.name}: an error where nothing is disturbed: {result}")
    return result
