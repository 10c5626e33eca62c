"""The models that requests may name: cards from the registry, with tokenizer and chat template made ready once each.

Owned by the event loop; loading and tokenising run in a small thread pool.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

import jinja2

from common.errors import GenerationFailed, ModelNotFound, ModelUnusable, Unavailable
from common.messages.registry import ModelCard
from gateway.chat_template import ChatTemplate
from gateway.engine import Engine
from gateway.guidance.grammars import Grammars
from gateway.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

MAX_NAME_CHARS = 128
"""So much of an unknown model's name is repeated to its client."""

ResultT = TypeVar("ResultT")
_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests can be sent to. `template` None: it cannot chat."""

    card: ModelCard
    tokenizer: ModelTokenizer
    template: ChatTemplate | None

    @property
    def system_fingerprint(self) -> str:
        """What the OpenAI API calls the back end's version: equal seeds promise equal answers while it is equal."""
        return f"fp_{self.card.fingerprint[:10]}"


class ServedModels:
    """Finds and loads models by name."""

    def __init__(self, engine: Engine, executor: Executor, render_timeout_s: float, grammars: Grammars) -> None:
        self.grammars = grammars
        self._engine = engine
        self._executor = executor
        self._render_timeout_s = render_timeout_s
        self._loading: dict[_Key, asyncio.Future[ServedModel]] = {}

    async def cards(self) -> Sequence[ModelCard]:
        """Return what the registry knows now."""
        return await self._engine.models()

    async def card(self, name: str) -> ModelCard:
        """Return a model's card; raises `ModelNotFound`, or `Unavailable` while there is no model at all."""
        cards = await self.cards()
        for card in cards:
            if card.model == name:
                return card
        if not cards:
            raise Unavailable("No model is loaded yet.", retry_after_s=2.0)
        raise ModelNotFound(
            f"The model '{name[:MAX_NAME_CHARS]}' does not exist here.", param="model", code="model_not_found"
        )

    async def get(self, name: str) -> ServedModel:
        """Return a model ready for use, loading it on its first request."""
        card = await self.card(name)
        key = (card.model, card.fingerprint, card.created)
        loading = self._loading.get(key)
        if loading is None:
            self._forget_older(card)
            loading = self._loading[key] = asyncio.ensure_future(self.run(lambda: self._load(card)))
        try:
            return await asyncio.shield(loading)  # one client that leaves must not stop it for the others
        except ModelUnusable as error:
            self._loading.pop(key, None)
            logger.exception("model cannot be served", extra={"model": card.model})
            raise GenerationFailed("The model's tokenizer cannot be used.") from error

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of `work`, done in the thread pool."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _forget_older(self, card: ModelCard) -> None:
        for key in [key for key in self._loading if key[0] == card.model]:
            del self._loading[key]

    def _load(self, card: ModelCard) -> ServedModel:
        return ServedModel(card, ModelTokenizer(card), self._template_of(card))

    def _template_of(self, card: ModelCard) -> ChatTemplate | None:
        if card.chat_template is None:
            return None
        try:
            return ChatTemplate(
                card.chat_template,
                bos_token=card.bos_token,
                eos_token=card.eos_token,
                timeout_s=self._render_timeout_s,
            )
        except jinja2.TemplateSyntaxError:
            logger.exception("chat template cannot be read", extra={"model": card.model})
            return None
