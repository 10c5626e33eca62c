"""Logprobs of a prompt as its worker sent them: read when somebody asks for them, as there may be a hundred thousand.

Reading one takes 3 us; all of a long prompt at once would keep every other stream of the gateway waiting.
"""

from collections.abc import Sequence
from typing import overload

from common.errors import GenerationFailed, MalformedRecord
from common.messages.logprobs import TokenLogprobs
from common.rpc.logprobs import logprobs_of
from proto import worker_pb2 as pb


class PromptLogprobs(Sequence[TokenLogprobs]):
    """One entry per message, equal to any sequence of the same entries. Getting one raises `GenerationFailed` if it
    makes no sense."""

    def __init__(self, messages: Sequence[pb.TokenLogprobs]) -> None:
        self._messages = messages

    def __len__(self) -> int:
        return len(self._messages)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenLogprobs]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprobs | Sequence[TokenLogprobs]:
        if isinstance(index, slice):
            return PromptLogprobs(self._messages[index])
        try:
            return logprobs_of(self._messages[index])
        except MalformedRecord as error:
            raise GenerationFailed("The logprobs of the prompt cannot be read.") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # like other sequences of what is read when it is asked for
