"""From a `GenerateRequest` to the `ValidRequest` that the HTTP API would make of the same request, with its checks."""

import struct
from collections.abc import Iterator
from dataclasses import replace

import msgspec

from common.errors import InvalidRequest
from gateway.body import typed
from gateway.schemas.chat import ChatRequest
from gateway.schemas.completions import CompletionRequest
from gateway.schemas.sampling import MAX_TOP_LOGPROBS
from gateway.validation import TextPrompt, TokenPrompt, ValidRequest, valid_chat, valid_completion
from proto.tandem.v1 import generate_pb2 as pb

Fields = dict[str, object]

_MOST_DIGITS = 9
"""So many significant digits tell all floats of 32 bits apart."""


def valid_request(message: pb.GenerateRequest) -> ValidRequest:
    """Return what the message asks for; raises `InvalidRequest`, whose parameter has its name in the HTTP API."""
    valid = _prompted(message)
    form = replace(valid.form, num_logprobs=_num_logprobs(message), shows_token_ids=message.wants_token_ids)
    return replace(valid, form=form)


def _prompted(message: pb.GenerateRequest) -> ValidRequest:
    fields = dict(_fields(message))
    match message.WhichOneof("prompt"):
        case "text":
            return replace(_completion(fields), prompts=(TextPrompt(message.text),))
        case "token_ids":
            return replace(_completion(fields), prompts=(TokenPrompt(list(message.token_ids.ids)),))
        case "chat":
            messages = [{"role": turn.role, "content": turn.content} for turn in message.chat.messages]
            return valid_chat(typed({**fields, "messages": messages}, ChatRequest))
        case None:
            raise InvalidRequest("`prompt` is missing: send `text`, `token_ids` or `chat`.", param="prompt")


def _completion(fields: Fields) -> ValidRequest:
    return valid_completion(typed({**fields, "prompt": ""}, CompletionRequest))


def _fields(message: pb.GenerateRequest) -> Iterator[tuple[str, object]]:
    yield "model", message.model
    yield "stream", True
    yield "stream_options", {"include_timing": message.includes_timing}
    if message.priority:
        yield "priority", message.priority
    if message.num_choices:
        yield "n", message.num_choices
    if message.cache_salt:
        yield "cache_salt", message.cache_salt
    yield from _sampling(message.sampling)


def _sampling(message: pb.Sampling) -> Iterator[tuple[str, object]]:
    """Yield the fields that are set."""
    for field, value in message.ListFields():
        match field.name, value:
            case "json_schema", _:
                yield "guided_json", msgspec.Raw(msgspec.json.encode(value))
            case "regex", _:
                yield "guided_regex", value
            case "logit_bias", _:
                yield field.name, {token_id: as_written(addend) for token_id, addend in value.items()}
            case (("stop" | "stop_token_ids"), _):
                yield field.name, list(value)
            case _, float():
                yield field.name, as_written(value)
            case _:
                yield field.name, value


def as_written(value: float) -> float:
    """Return the shortest number that is this float of 32 bits: 0.7 is what its client wrote, not 0.699999988."""
    for num_digits in range(6, _MOST_DIGITS):
        shorter = float(f"{value:.{num_digits}g}")
        if _as_float32(shorter) == value:
            return shorter
    return value


def _as_float32(value: float) -> float:
    try:
        (rounded,) = struct.unpack("f", struct.pack("f", value))
    except OverflowError:  # the largest floats, rounded up
        return float("inf")
    return float(rounded)


def _num_logprobs(message: pb.GenerateRequest) -> int | None:
    if not message.HasField("num_logprobs"):
        return None
    if message.num_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"`num_logprobs` must be at most {MAX_TOP_LOGPROBS}.", param="num_logprobs")
    return message.num_logprobs
