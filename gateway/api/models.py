"""`GET /v1/models` and `GET /v1/models/{model}`."""

from aiohttp import web

from common.messages.ids import ModelName
from common.messages.registry import ModelCard
from gateway.api.errors import json_response
from gateway.api.keys import CALLER, SERVICE
from gateway.schemas.models import ModelEntry, ModelList


async def list_models(http: web.Request) -> web.Response:
    """List what the registry knows now and the caller may use."""
    cards = await http.app[SERVICE].models.cards()
    return json_response(ModelList("list", tuple(_entry(card) for card in cards if http[CALLER].may_see(card.model))))


async def show_model(http: web.Request) -> web.Response:
    """Show one model."""
    model = ModelName(http.match_info["model"])
    http[CALLER].require(model)
    return json_response(_entry(await http.app[SERVICE].models.card(model)))


def _entry(card: ModelCard) -> ModelEntry:
    return ModelEntry(card.model, "model", card.created, "tandem", card.max_context)
