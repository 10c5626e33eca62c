"""`POST /v1/embeddings`: no model here makes any, and a client is told so by name."""

from functools import partial
from typing import NoReturn

import msgspec
from aiohttp import web

from common.errors import InvalidRequest
from common.messages.ids import ModelName
from gateway.api.bodies import parse_body
from gateway.api.keys import CALLER, SERVICE
from gateway.body import decode_json
from gateway.schemas.embeddings import EmbeddingRequest

_decoder = msgspec.json.Decoder(EmbeddingRequest)


async def refuse_embeddings(http: web.Request) -> NoReturn:
    """Raise what is wrong with the request; if nothing else is, its model."""
    request = await parse_body(http, partial(decode_json, _decoder))
    http[CALLER].require(ModelName(request.model))
    card = await http.app[SERVICE].models.card(request.model)
    raise InvalidRequest(
        f"The model '{card.model}' generates text; it makes no embeddings.", param="model", code="model_not_embedding"
    )
