"""One answer of the tiny model without HTTP: scripted events in, what its sink is given out."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from common.messages.ids import ChoiceIndex, ModelName, RequestId
from common.messages.registry import ModelCard
from common.messages.sampling import SamplingParams
from common.telemetry.metrics import GatewayMetrics
from gateway.accepting import Accepted, AcceptedPrompt
from gateway.answer import Answer
from gateway.answer_choice import AnswerChoice
from gateway.answer_parser import Content, MakeParser, Piece
from gateway.engine import GenerateEvent, GenerateRequest, Readiness
from gateway.request_ids import part_of
from gateway.request_record import RequestRecord
from gateway.schemas.sampling import SamplingFields
from gateway.served_models import ServedModel
from gateway.text_stream import AnswerToken
from gateway.tokenizer import ModelTokenizer
from gateway.validation import AnswerForm, TextPrompt, ValidRequest
from tests.support.tiny_tokenizer import EOS, byte_level_tokenizer, id_of, tiny_card

TOKENIZER = byte_level_tokenizer()
CARD = tiny_card(TOKENIZER)
END_ID = id_of(TOKENIZER, EOS)
MODEL = ServedModel(CARD, ModelTokenizer(CARD), None)
MAX_SILENCE_S = 5.0


class PlayedEngine:
    """An `Engine` that plays these events, one list per prompt, and knows what was closed and what was ended."""

    def __init__(self, *plays: Sequence[GenerateEvent | Exception]) -> None:
        self._plays = plays
        self.num_played = [0] * len(plays)
        self.closed: list[int] = []
        self.ended: list[tuple[RequestId, ChoiceIndex]] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        number = int(request.request.partition("-")[2] or 0)
        try:
            for event in self._plays[number]:
                if isinstance(event, Exception):
                    raise event
                self.num_played[number] += 1
                yield event
        finally:
            self.closed.append(number)

    def end_choice(self, request: RequestId, choice: ChoiceIndex) -> None:
        self.ended.append((request, choice))

    async def models(self) -> Sequence[ModelCard]:
        return [CARD]

    def readiness(self) -> Readiness:
        return Readiness(is_ready=True)


@dataclass
class SeenSink:
    """An `AnswerSink` that keeps what it is given."""

    is_full = False
    deltas: list[tuple[int, list[Piece], list[AnswerToken]]] = field(default_factory=list)
    ends: list[tuple[int, str]] = field(default_factory=list)

    def start(self, answer: Answer) -> None:
        pass

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Sequence[AnswerToken]) -> None:
        assert pieces or tokens
        self.deltas.append((index, list(pieces), list(tokens)))

    def end(self, choice: AnswerChoice) -> None:
        self.ends.append((choice.index, choice.finish_reason))

    async def room(self) -> None:
        raise AssertionError("it is never full")

    def text(self, index: int = 0) -> str:
        """Return the content of a choice."""
        pieces = [piece for number, pieces, _ in self.deltas for piece in pieces if number == index]
        return "".join(piece.text for piece in pieces if isinstance(piece, Content))

    def tokens(self, index: int = 0) -> list[AnswerToken]:
        """Return the tokens that were told of a choice."""
        return [token for number, _, tokens in self.deltas for token in tokens if number == index]


def accepted(
    *,
    num_prompts: int = 1,
    form: AnswerForm | None = None,
    stops: Sequence[str] = (),
    make_parser: MakeParser | None = None,
) -> Accepted:
    """Return a request for prompts of 7, 8, ... tokens."""
    form = form or AnswerForm()
    request = ValidRequest(
        model=ModelName("tiny"),
        prompts=(TextPrompt("x"),) * num_prompts,
        sampling=SamplingFields(model="tiny"),
        max_tokens=None,
        stops=tuple(stops),
        form=form,
        make_parser=make_parser,
    )
    sampling = SamplingParams(seed=1, max_tokens=50, stop_ids=(END_ID,), num_logprobs=form.num_logprobs)
    prompts = [
        GenerateRequest(
            part_of(RequestId("r"), index),
            ModelName("tiny"),
            [1] * (7 + index),
            sampling,
            num_choices=form.num_generated,
        )
        for index in range(num_prompts)
    ]
    return Accepted(request, MODEL, tuple(map(AcceptedPrompt, prompts)))


def record() -> RequestRecord:
    """Return the record of a request that has just arrived."""
    return RequestRecord(GatewayMetrics(CollectorRegistry()), arrived_s=0.0)


async def play(engine: PlayedEngine, request: Accepted, sink: SeenSink) -> Answer:
    """Read the whole answer."""
    answer = Answer(request, engine, sink, record())
    await answer.read(MAX_SILENCE_S)
    return answer
