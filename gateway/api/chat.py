"""`POST /v1/chat/completions`."""

from collections.abc import Sequence

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from gateway.accepting import Accepted
from gateway.answer_parser import Content, Piece, Reasoning, ToolCallDelta
from gateway.api.answers import answer
from gateway.api.bodies import parse_body
from gateway.api.heading import Heading
from gateway.api.shape import Endpoint, TextChunks, UsageSlot
from gateway.collection import WholeCall, WholeChoice
from gateway.logprobs import chat_logprobs
from gateway.schemas.chat import (
    AnswerMessage,
    AnswerToolCall,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    FunctionDelta,
    ToolCallChunk,
)
from gateway.schemas.usage import Timing, Usage
from gateway.sse import event_of
from gateway.text_stream import AnswerToken
from gateway.validation import parse_chat

_encode = msgspec.json.Encoder().encode


class ChatShape:
    """Writes one chat answer."""

    def __init__(self, heading: Heading, accepted: Accepted) -> None:
        self._heading = heading
        self._tokenizer = accepted.model.tokenizer
        self._has_logprobs = accepted.request.form.num_logprobs is not None
        self._shows_ids = accepted.request.form.shows_token_ids
        self._prompt_ids = list(accepted.prompts[0].generate.prompt_ids) if self._shows_ids else []
        self._text_chunks = TextChunks(lambda index, text: self._piece(index, Delta(content=text), heading.unused))
        self._opened: set[int] = set()

    def delta(self, index: int, pieces: Sequence[Piece], tokens: Sequence[AnswerToken], usage: UsageSlot) -> bytes:
        """Return one chunk per piece; what is told of tokens goes with the first."""
        opening = b"" if index in self._opened else self._opening(index)
        if tokens or isinstance(usage, Usage):
            return opening + self._full_chunks(index, pieces, tokens, usage)
        if len(pieces) == 1 and type(pieces[0]) is Content:  # as nearly all are
            return opening + self._text_chunks.chunk(index, pieces[0].text)
        return opening + b"".join([self._bare_chunk(index, piece) for piece in pieces])

    def ending(self, index: int, reason: str, usage: UsageSlot, timing: Timing | UnsetType) -> bytes:
        """Return the last chunk of a choice."""
        opening = b"" if index in self._opened else self._opening(index)
        return opening + self._envelope((ChunkChoice(index, Delta(), reason),), usage, timing)

    def closing(self, usage: Usage, timing: Timing | UnsetType) -> bytes:
        """Return the chunk that holds the usage."""
        return self._envelope((), usage, timing)

    def whole(self, choices: Sequence[WholeChoice], usage: Usage, timing: Timing | UnsetType) -> bytes:
        """Return the answer that is not streamed."""
        head = self._heading
        return _encode(
            ChatCompletion(
                id=head.id,
                object="chat.completion",
                created=head.created,
                model=head.model,
                choices=tuple(self._whole_choice(index, choice) for index, choice in enumerate(choices)),
                usage=usage,
                system_fingerprint=head.system_fingerprint,
                prompt_token_ids=self._prompt_ids if self._shows_ids else UNSET,
                timing=timing,
            )
        )

    def _opening(self, index: int) -> bytes:
        """Return the chunk that names the role; the first of all has the ids of the prompt if they are wanted."""
        prompt_ids = self._prompt_ids if self._shows_ids and not self._opened else UNSET
        self._opened.add(index)
        choice = ChunkChoice(index, Delta(role="assistant", content=""))
        return self._envelope((choice,), self._heading.unused, prompt_ids=prompt_ids)

    def _bare_chunk(self, index: int, piece: Piece) -> bytes:
        if type(piece) is Content:
            return self._text_chunks.chunk(index, piece.text)
        return self._piece(index, _delta_of(piece), self._heading.unused)

    def _full_chunks(
        self, index: int, pieces: Sequence[Piece], tokens: Sequence[AnswerToken], usage: UsageSlot
    ) -> bytes:
        first, *others = [_delta_of(piece) for piece in pieces] or [Delta(content="")]
        choice = ChunkChoice(index, first, None, self._logprobs(tokens), self._ids(tokens))
        return self._envelope((choice,), usage) + b"".join([self._piece(index, delta, usage) for delta in others])

    def _piece(self, index: int, delta: Delta, usage: UsageSlot) -> bytes:
        return self._envelope((ChunkChoice(index, delta),), usage)

    def _envelope(
        self,
        choices: tuple[ChunkChoice, ...],
        usage: UsageSlot,
        timing: Timing | UnsetType = UNSET,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        head = self._heading
        chunk = ChatChunk(
            id=head.id,
            object="chat.completion.chunk",
            created=head.created,
            model=head.model,
            choices=choices,
            system_fingerprint=head.system_fingerprint,
            usage=usage,
            prompt_token_ids=prompt_ids,
            timing=timing,
        )
        return event_of(_encode(chunk))

    def _whole_choice(self, index: int, choice: WholeChoice) -> ChatChoice:
        content = "".join(choice.content)
        message = AnswerMessage(
            role="assistant",
            content=None if choice.calls and not content else content,
            reasoning_content="".join(choice.reasoning) if choice.reasoning else UNSET,
            tool_calls=tuple(map(_whole_call, choice.calls.values())) if choice.calls else UNSET,
        )
        logprobs = self._logprobs(choice.tokens, is_whole=True)
        return ChatChoice(index, message, choice.finish_reason, logprobs, self._ids(choice.tokens))

    def _logprobs(self, tokens: Sequence[AnswerToken], *, is_whole: bool = False) -> ChatLogprobs | None:
        if not self._has_logprobs or not (tokens or is_whole):
            return None
        return chat_logprobs(tokens, self._tokenizer)

    def _ids(self, tokens: Sequence[AnswerToken]) -> list[int] | UnsetType:
        return [token.token_id for token in tokens] if self._shows_ids else UNSET


def _delta_of(piece: Piece) -> Delta:
    match piece:
        case Content(text):
            return Delta(content=text)
        case Reasoning(text):
            return Delta(reasoning_content=text)
        case ToolCallDelta(index, arguments, call_id, name):
            function = FunctionDelta(UNSET if name is None else name, arguments)
            is_first = call_id is not None
            call = ToolCallChunk(index, function, call_id if call_id is not None else UNSET)
            return Delta(tool_calls=(msgspec.structs.replace(call, type="function") if is_first else call,))


def _whole_call(call: WholeCall) -> AnswerToolCall:
    return AnswerToolCall(call.id, "function", CalledFunction(call.name, "".join(call.arguments)))


async def create_chat_completion(http: web.Request) -> web.StreamResponse:
    """Answer a conversation."""
    return await answer(http, await parse_body(http, parse_chat), Endpoint("chatcmpl", ChatShape))
