"""All choices of one request, and the engine's streams that they come from.

The same for every way out: HTTP streams, whole answers, gRPC. What is ready goes to an `AnswerSink`.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from itertools import islice
from typing import Protocol

from msgspec import UNSET

from common.errors import DeadlineExceeded, GenerationFailed
from common.messages.ids import ChoiceIndex, RequestId
from gateway.accepting import Accepted, AcceptedPrompt
from gateway.answer_choice import AnswerChoice
from gateway.answer_parser import Piece, PlainAnswer
from gateway.engine import Engine, GenerateEvent, Generation, StageTimes, TokenDelta
from gateway.patience import Patience
from gateway.request_record import RequestRecord
from gateway.schemas.usage import CompletionTokensDetails, PromptTokensDetails, Usage
from gateway.text_stream import AnswerText, AnswerToken, StopRules

ECHOED_AT_ONCE = 256
"""So many tokens of a prompt are written, about 1 ms, before others get their turn."""


EndChoice = Callable[[RequestId, ChoiceIndex], None]
"""See `Engine.end_choice`."""


class AnswerSink(Protocol):
    """Takes what is ready of an answer: a stream to a client, or a collection of whole choices."""

    def start(self, answer: "Answer") -> None:
        """Whose counts and times may be asked for from now on; called once, before anything else."""

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Sequence[AnswerToken]) -> None:
        """Take more of the choice of that number; pieces or tokens may be none, but not both."""

    def end(self, choice: AnswerChoice) -> None:
        """Take the end of a choice; the answer is over with its last one."""

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be given before `room` has returned."""

    async def room(self) -> None:
        """Wait until more may be given."""


class PromptAnswers:
    """The choices of one prompt."""

    def __init__(self, prompt: AcceptedPrompt, choices: Sequence[AnswerChoice]) -> None:
        self.prompt = prompt
        self.choices = choices
        self.num_open = len(choices)
        self.num_cached_tokens = 0
        """Tokens of the prompt that came from a prefix cache."""


class Answer:
    """Owned by whoever serves the request. `read` fills the sink; the counts are right at any time."""

    def __init__(self, accepted: Accepted, engine: Engine, sink: AnswerSink, record: RequestRecord) -> None:
        self._accepted = accepted
        self._engine = engine
        self._sink = sink
        self._record = record
        self._prompts = [self._open(index, prompt) for index, prompt in enumerate(accepted.prompts)]
        self._num_open = sum(prompt.num_open for prompt in self._prompts)
        self.times: StageTimes | None = None
        """Where the time of the choice that ended last went, if its worker told."""
        sink.start(self)

    @property
    def choices(self) -> list[AnswerChoice]:
        """All choices, those of the first prompt first."""
        return [choice for prompt in self._prompts for choice in prompt.choices]

    @property
    def is_over(self) -> bool:
        """Whether every choice has ended."""
        return self._num_open == 0

    @property
    def usage(self) -> Usage:
        """The counts so far; each prompt counts once, however many choices it has."""
        num_prompt = sum(len(prompt.prompt.generate.prompt_ids) for prompt in self._prompts)
        num_generated = sum(choice.num_tokens for choice in self.choices)
        num_reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_generated,
            total_tokens=num_prompt + num_generated,
            prompt_tokens_details=PromptTokensDetails(sum(prompt.num_cached_tokens for prompt in self._prompts)),
            completion_tokens_details=CompletionTokensDetails(num_reasoning) if num_reasoning else UNSET,
        )

    async def read(self, max_silence_s: float) -> None:
        """Read every prompt's stream until all choices have ended, or raise what one of the streams raises.

        All streams are closed then. `DeadlineExceeded` after a silence of `max_silence_s` in one of them;
        `GenerationFailed` if one stops without an end.
        """
        if len(self._prompts) == 1:
            await self._read_one(self._prompts[0], max_silence_s)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for prompt in self._prompts:
                    tasks.create_task(self._read_one(prompt, max_silence_s))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _read_one(self, answers: PromptAnswers, max_silence_s: float) -> None:
        sink = self._sink
        with closing(Patience(max_silence_s)) as patience:
            tap = _AnswerTap(self, answers, sink, patience, self._engine.end_choice)
            async with aclosing(self._engine.generate(replace(answers.prompt.generate, tap=tap))) as events:
                event = await _next(events, patience)
                if event is not None:
                    await self._echo(answers, event)
                    tap.has_begun = True
                while event is not None:
                    self.take(answers, event)
                    if not answers.num_open:
                        return
                    if sink.is_full:
                        await sink.room()
                    event = await _next(events, patience)
        if answers.num_open:
            raise GenerationFailed("The answer ended without a reason.")

    async def _echo(self, answers: PromptAnswers, event: GenerateEvent) -> None:
        echo, form = answers.prompt.echo, self._accepted.request.form
        if echo is None:
            return
        logprobs = event.prompt_logprobs if isinstance(event, TokenDelta) else ()
        for choice in answers.choices:
            if not self._accepted.tells_tokens:
                choice.echo(echo.text, ())
                continue
            text, tokens = echo.text, echo.tokens(logprobs, has_logprobs=form.num_logprobs is not None)
            while some := list(islice(tokens, ECHOED_AT_ONCE)):
                choice.echo(text, some)
                text = ""
                await asyncio.sleep(0)

    def take(self, answers: PromptAnswers, event: GenerateEvent) -> None:
        """Take what an engine tells of a prompt's choices."""
        choice = answers.choices[event.choice]
        if not choice.is_open:
            return
        if event.num_cached_tokens > answers.num_cached_tokens:
            answers.num_cached_tokens = event.num_cached_tokens
        if isinstance(event, TokenDelta):
            if num_new := choice.take(event):
                choice.last_token_s = self._record.tokens_arrived(num_new, choice.last_token_s)
        else:
            self.times = event.times or self.times
            choice.close(event)
        if choice.is_open:
            return
        answers.num_open -= 1
        self._num_open -= 1
        self._sink.end(choice)
        if answers.num_open and isinstance(event, TokenDelta):
            self._engine.end_choice(answers.prompt.generate.request, event.choice)

    def _open(self, index: int, prompt: AcceptedPrompt) -> PromptAnswers:
        num_choices = prompt.generate.num_choices
        return PromptAnswers(
            prompt, [self._choice(prompt, index * num_choices + number) for number in range(num_choices)]
        )

    def _choice(self, prompt: AcceptedPrompt, index: int) -> AnswerChoice:
        accepted, form, sampling = self._accepted, self._accepted.request.form, prompt.generate.sampling
        tokens: list[AnswerToken] | None = [] if accepted.tells_tokens and not form.hides_tokens else None
        rules = StopRules(
            accepted.request.stops, frozenset(sampling.stop_ids), sampling.min_tokens, is_shown=form.shows_stop
        )
        make_parser = accepted.request.make_parser
        parser = PlainAnswer() if make_parser is None else make_parser(accepted.model, prompt.generate.prompt_ids)
        text = AnswerText(
            accepted.model.tokenizer.detokenizer(skips_special=form.skips_special, shown=parser.markers),
            rules,
            None if tokens is None else tokens.append,
        )
        text.start_behind(0 if prompt.echo is None else len(prompt.echo.text))
        return AnswerChoice(index, text, parser, self._sink.delta, tokens=tokens, is_hidden=form.hides_tokens)


class _AnswerTap:
    """Takes tokens for the choices of one prompt, once the reader has taken the first."""

    def __init__(
        self, answer: Answer, answers: PromptAnswers, sink: AnswerSink, patience: Patience, end: EndChoice
    ) -> None:
        self._take = answer.take
        self._answers = answers
        self._end = end
        self._sink = sink
        self._patience = patience
        self.has_begun = False

    @property
    def is_open(self) -> bool:
        """See `Tap.is_open`."""
        return self.has_begun and not self._sink.is_full

    def take(self, delta: TokenDelta) -> None:
        """See `Tap.take`."""
        self._patience.renew()
        self._take(self._answers, delta)
        if not self._answers.num_open:  # wakes the reader
            self._end(self._answers.prompt.generate.request, delta.choice)


async def _next(events: Generation, patience: Patience) -> GenerateEvent | None:
    """Return the next event, None if there are no more."""
    try:
        with patience:
            return await anext(events)
    except StopAsyncIteration:
        return None
    except TimeoutError as error:
        if patience.is_over:
            raise DeadlineExceeded("No token came for too long.") from error
        raise
