"""`POST /tokenize` and `POST /detokenize`: to the limits of a key they are requests, but no tokens."""

from functools import partial
from typing import Protocol

import msgspec
from aiohttp import web

from common.messages.ids import ModelName
from gateway.api.bodies import parse_body
from gateway.api.errors import encoded_response
from gateway.api.keys import CALLER, QUOTA, REQUEST_ID, SERVICE
from gateway.claims import Claim, NoTokens
from gateway.served_models import ServedModel
from gateway.tokenization import parse_detokenize, parse_tokenize


class Conversion(Protocol):
    """What a client wants converted by the tokenizer of `model`."""

    @property
    def model(self) -> ModelName:
        """Whose tokenizer."""

    def run(self, model: ServedModel) -> msgspec.Struct:
        """Return the answer; takes long."""


async def tokenize(http: web.Request) -> web.Response:
    """Return the ids of a text or of a conversation."""
    return await _convert(http, await parse_body(http, parse_tokenize))


async def detokenize(http: web.Request) -> web.Response:
    """Return the text of ids."""
    return await _convert(http, await parse_body(http, parse_detokenize))


async def _convert(http: web.Request, wanted: Conversion) -> web.Response:
    service, caller = http.app[SERVICE], http[CALLER]
    caller.require(wanted.model)
    claim = Claim(
        caller=caller,
        request=http[REQUEST_ID],
        num_choices=1,
        num_prompt_tokens=0,
        max_tokens=0,
        meter=NoTokens(),
        on_quota=partial(http.__setitem__, QUOTA),
    )
    async with service.admission.reserve(claim):
        model = await service.models.get(wanted.model)
        body = await service.models.run(lambda: msgspec.json.encode(wanted.run(model)))
    return encoded_response(body)
