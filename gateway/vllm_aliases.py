"""The metrics once more under vLLM's names; they carry the model's name, which a gateway learns from the registry."""

from common.errors import Unavailable
from common.telemetry.metrics import GatewayMetrics
from common.telemetry.vllm_names import alias_gateway
from gateway.served_models import ServedModels


class VllmAliases:
    """Adds the aliases as soon as there is a model to name."""

    def __init__(self, metrics: GatewayMetrics, models: ServedModels) -> None:
        self._metrics = metrics
        self._models = models
        self._is_done = False

    async def ensure(self) -> None:
        """Add the aliases, if a model is known and they are not there yet."""
        if self._is_done:
            return
        try:
            cards = await self._models.cards()
        except Unavailable:
            return
        if cards and not self._is_done:
            alias_gateway(self._metrics, cards[0].model)
            self._is_done = True
