"""What the handlers of one gateway share."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from common.telemetry.metrics import GatewayMetrics
from gateway.admission import Admission
from gateway.brake import Brake
from gateway.connections import Connections
from gateway.engine import Engine
from gateway.entrance import Entrance
from gateway.served_models import ServedModels
from gateway.settings import GatewaySettings
from gateway.under_way import UnderWay


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that lives as long as the process; owned by the application."""

    engine: Engine
    models: ServedModels
    admission: Admission
    metrics: GatewayMetrics
    settings: GatewaySettings
    executor: ThreadPoolExecutor
    entrance: Entrance
    brake: Brake = field(default_factory=Brake)
    connections: Connections = field(default_factory=Connections)
    under_way: UnderWay = field(default_factory=UnderWay)

    def close(self) -> None:
        """Let the threads end."""
        self.executor.shutdown(wait=False, cancel_futures=True)
