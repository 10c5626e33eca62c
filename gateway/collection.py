"""Whole answers, for clients that want no stream: everything is kept until the last choice has ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.answer import Answer
from gateway.answer_choice import AnswerChoice
from gateway.answer_parser import Content, Piece, Reasoning, ToolCallDelta
from gateway.text_stream import AnswerToken


@dataclass(slots=True)
class WholeCall:
    """A tool call as far as it has come."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class WholeChoice:
    """A choice as far as it has come."""

    finish_reason: str = ""
    mean_logprob: float = 0.0
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, WholeCall] = field(default_factory=dict)
    tokens: list[AnswerToken] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        match piece:
            case Content(text):
                self.content.append(text)
            case Reasoning(text):
                self.reasoning.append(text)
            case ToolCallDelta(index, arguments, call_id, name):
                call = self.calls.setdefault(index, WholeCall())
                call.id, call.name = call_id or call.id, name or call.name
                call.arguments.append(arguments)


class Collection:
    """An `AnswerSink` that keeps everything."""

    is_full = False

    def __init__(self) -> None:
        self._choices: list[WholeChoice] = []

    def start(self, answer: Answer) -> None:
        """Make room for the answer's choices."""
        self._choices = [WholeChoice() for _ in answer.choices]

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Sequence[AnswerToken]) -> None:
        """Keep it."""
        choice = self._choices[index]
        for piece in pieces:
            choice.add(piece)
        choice.tokens += tokens

    def end(self, choice: AnswerChoice) -> None:
        """Note how it ended."""
        whole = self._choices[choice.index]
        whole.finish_reason, whole.mean_logprob = choice.finish_reason, choice.mean_logprob

    async def room(self) -> None:
        """There is always room."""

    def best(self, num_wanted: int, num_generated: int) -> list[WholeChoice]:
        """Return the likeliest `num_wanted` of each prompt's `num_generated` choices, likeliest first; all of them as
        they are numbered if all are wanted."""
        if num_wanted == num_generated:
            return self._choices
        chosen: list[WholeChoice] = []
        for start in range(0, len(self._choices), num_generated):
            ranked = sorted(self._choices[start : start + num_generated], key=lambda choice: -choice.mean_logprob)
            chosen += ranked[:num_wanted]
        return chosen
