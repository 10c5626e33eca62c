"""What `tandem bench serve` is told."""

from dataclasses import dataclass

from common.errors import InvalidSetting
from common.settings.readers import auto, boolean, integer, number, text
from common.settings.setting import setting
from tandem.client.settings import ClientSettings

LOWEST_TOKEN_ID = 100
"""Vocabularies begin with special tokens; a prompt of those is not what anybody sends."""

SEEDS = 1 << 63


@dataclass(frozen=True, kw_only=True)
class BenchServeSettings(ClientSettings):
    """Send streamed completions with random prompts, each one unique, and measure.

    Closed loop: --concurrency requests are always in progress. Open loop (--rate): requests arrive at random (Poisson)
    at that rate, whether or not earlier ones are done, and --concurrency only caps how many are in progress; times
    then count from the arrival.

    --json prints {"url", "model", "concurrency", "rate", "seed", "requests", "completed", "errors",
    "error_messages": {message: count}, "duration_s", "input_tokens", "output_tokens", "output_tokens_per_s",
    "requests_per_s"} and, each as {"mean", "p50", "p90", "p99"} in seconds: "ttft_s" (first token), "inter_token_s"
    (between two events with text), "per_output_token_s" (mean of one request after its first token), "end_to_end_s".
    Failed requests count as errors and in nothing else. The exit code is 1 if there was one.
    """

    model: str | None = setting(
        None, "model; auto: the first that the gateway serves", auto(text), env="TANDEM_CLIENT_MODEL"
    )
    concurrency: int | None = setting(None, "requests in progress; auto: 1, with --rate any number", auto(integer(1)))
    requests: int = setting(32, "requests in all", integer(1))
    input_tokens: int = setting(128, "length of each prompt", integer(1), unit="tokens")
    output_tokens: int = setting(64, "length of each answer", integer(1), unit="tokens")
    rate: float | None = setting(None, "arrivals per second; auto: closed loop", auto(number(1e-6)))
    warmup: int = setting(1, "requests before the measurement", integer(0))
    ignore_eos: bool = setting(True, "go on behind the end of an answer, so that all have the same length", boolean)
    temperature: float = setting(0.0, "of the sampling; 0 is greedy", number(0, 2))
    highest_token_id: int = setting(10000, "prompts are drawn from the ids 100 to this one", integer(LOWEST_TOKEN_ID))
    seed: int | None = setting(
        None,
        "of prompts and arrivals; auto: random, so that a second run finds nothing cached",
        auto(integer(0, SEEDS)),
    )
    timeout_s: float = setting(600.0, "longest wait for one request", number(0.001), unit="seconds")
    json: bool = setting(False, "print JSON", boolean)

    def __post_init__(self) -> None:
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise InvalidSetting("url", self.url, "must start with http:// or https://")
