"""When a placement reached the stages of its life on this worker, by the monotonic clock in seconds."""

import time
from dataclasses import dataclass, field

from proto import worker_pb2 as pb


@dataclass(slots=True)
class Stages:
    """Begins when the placement is accepted."""

    accepted_s: float = field(default_factory=time.monotonic)
    begun_s: float | None = None
    transfer_s: float = 0.0
    """From the first pulled page to the last one of the try that has brought them all."""

    def begin(self) -> None:
        """Note that the prompt is computed from now on, here or elsewhere; the first time counts."""
        if self.begun_s is None:
            self.begun_s = time.monotonic()

    def times(self, first_token_s: float) -> pb.StageTimes:
        """Return where the time of a choice went that ends now; its first token came at `first_token_s`."""
        begun_s = self.accepted_s if self.begun_s is None else self.begun_s
        return pb.StageTimes(
            wait_s=begun_s - self.accepted_s,
            prefill_s=first_token_s - begun_s,
            transfer_s=self.transfer_s,
            decode_s=time.monotonic() - first_token_s,
        )
