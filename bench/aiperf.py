"""The load client `aiperf`, as it comes from PyPI, against a running cluster: do its token counts and latencies agree
with the metrics of the gateways?

It lives in an environment of its own (`python3 -m venv .bench/aiperf && .bench/aiperf/bin/pip install aiperf`), and
counts tokens with the tokenizer of the cluster, which is written into a folder for it.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from common.broker.connection import RedisConnection
from common.broker.redis_broker import RedisBroker
from common.broker.redis_registry import RedisModelIndex
from common.messages.registry import ModelCard
from common.settings.gateway import own_socket_in
from tandem.cluster.state import DEFAULT_STATE_DIR, ClusterState, StateDir

ENDPOINTS = ("chat", "completions")
INPUT_TOKENS, OUTPUT_TOKENS = 64, 24
MS = 1000.0

LATENCY_TOLERANCE = 0.1
LATENCY_TOLERANCE_MS = 15.0
"""Between a token that leaves the gateway and the moment at which a client notes it: the client's own work, mostly."""

RECOUNT_TOLERANCE = 0.01
"""Tokens of a text are not always those that it was generated of."""

Totals = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure as the client and as the gateways have it; `tolerance` is absolute."""

    endpoint: str
    what: str
    client: float
    gateways: float
    tolerance: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether they are as close as they must be."""
        return abs(self.client - self.gateways) <= self.tolerance


def main() -> int:
    """Run and compare; 1 if something differs."""
    arguments = _parse()
    state = StateDir(arguments.state_dir).read_running()
    if state is None:
        sys.exit(f"no cluster runs in {arguments.state_dir}: make up")
    comparisons: list[Comparison] = []
    with tempfile.TemporaryDirectory(prefix="tandem-aiperf-") as name:
        folder = Path(name)
        card = asyncio.run(_card(state))
        _write_tokenizer(card, folder / "tokenizer")
        for endpoint in ENDPOINTS:
            before = asyncio.run(_totals(state))
            found = _profile(arguments, state, card, endpoint, folder)
            comparisons += _compare(endpoint, found, before, asyncio.run(_totals(state)))
    return _print(comparisons)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiperf", default=".bench/aiperf/bin/aiperf", help="its command (default %(default)s)")
    parser.add_argument(
        "--state-dir", type=Path, default=DEFAULT_STATE_DIR, help="of `tandem up` (default %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=24, help="per endpoint (default %(default)s)")
    parser.add_argument("--concurrency", type=int, default=4, help="at once (default %(default)s)")
    return parser.parse_args()


async def _card(state: ClusterState) -> ModelCard:
    connection = RedisConnection(state.redis_url)
    try:
        [model] = await RedisModelIndex(connection).models()
        card = await RedisBroker(connection, model).registry.card()
    finally:
        await connection.close()
    assert card is not None  # its workers have published it, or it would not be ready
    return card


def _write_tokenizer(card: ModelCard, folder: Path) -> None:
    """Write what `transformers.AutoTokenizer` reads."""
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(zlib.decompress(card.tokenizer))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": card.chat_template,
        "bos_token": card.bos_token,
        "eos_token": card.eos_token,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


async def _totals(state: ClusterState) -> Totals:
    """Return the sum of every metric over all gateways, by its name."""
    totals: dict[str, float] = defaultdict(float)
    for entry in state.processes:
        if entry.role == "gateway" and entry.ref is not None:
            connector = aiohttp.UnixConnector(str(own_socket_in(Path(state.run_dir), entry.ref.pid)))
            async with aiohttp.ClientSession(connector=connector) as session, session.get("http://x/metrics") as answer:
                for family in text_string_to_metric_families(await answer.text()):
                    for sample in family.samples:
                        totals[sample.name] += sample.value
    return totals


def _profile(
    arguments: argparse.Namespace, state: ClusterState, card: ModelCard, endpoint: str, folder: Path
) -> Mapping[str, Any]:
    """Return what aiperf exports of one run."""
    out = folder / endpoint
    command = [arguments.aiperf, "profile", "--model", card.model, "--url", f"http://{state.host}:{state.port}"]
    command += ["--endpoint-type", endpoint, "--streaming", "--tokenizer", str(folder / "tokenizer")]
    command += ["--concurrency", str(arguments.concurrency), "--request-count", str(arguments.requests)]
    command += ["--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--synthetic-input-tokens-stddev", "0"]
    command += ["--output-tokens-mean", str(OUTPUT_TOKENS), "--output-tokens-stddev", "0"]
    command += ["--extra-inputs", "ignore_eos:true", "--random-seed", "1", "--ui", "none"]
    command += ["--apply-chat-template"] if endpoint == "chat" else []
    result = subprocess.run(
        [*command, "--output-artifact-dir", str(out)], cwd=folder, capture_output=True, text=True, check=False
    )
    export = out / "profile_export_aiperf.json"
    if result.returncode or not export.exists():
        sys.exit(f"aiperf failed:\n{result.stdout[-3000:]}{result.stderr[-3000:]}")
    found: Mapping[str, Any] = json.loads(export.read_text())
    return found


def _compare(endpoint: str, found: Mapping[str, Any], before: Totals, after: Totals) -> Iterator[Comparison]:
    def grown(name: str) -> float:
        return after[f"tandem_{name}"] - before[f"tandem_{name}"]

    def mean_ms(name: str) -> float:
        return MS * grown(f"{name}_sum") / (grown(f"{name}_count") or 1)

    num_requests, num_output_tokens = grown("request_success_total"), grown("generation_tokens_total")
    num_prompt_tokens = grown("prompt_tokens_total")
    # With the template around it a message has as many tokens as were asked for; aiperf counts those of the bare text.
    is_chat = endpoint == "chat"
    counted = INPUT_TOKENS * num_requests if is_chat else found["input_sequence_length"]["sum"]
    counts = {
        "requests": (found["request_count"]["avg"], num_requests),
        "prompt tokens, told in usage": (found["usage_prompt_tokens"]["sum"], num_prompt_tokens),
        "prompt tokens, " + ("made with the template" if is_chat else "counted by the client"): (
            counted,
            num_prompt_tokens,
        ),
        "output tokens, told in usage": (found["usage_completion_tokens"]["sum"], num_output_tokens),
    }
    for what, (client, gateways) in counts.items():
        yield Comparison(endpoint, what, client, gateways)
    recounted = found["output_sequence_length"]["sum"]
    what = "output tokens, counted by the client"
    yield Comparison(endpoint, what, recounted, num_output_tokens, RECOUNT_TOLERANCE * num_output_tokens)
    latencies = {
        "time to first token, mean ms": ("time_to_first_token", "time_to_first_token_seconds"),
        "inter-token latency, mean ms": ("inter_token_latency", "inter_token_latency_seconds"),
        "request latency, mean ms": ("request_latency", "e2e_request_latency_seconds"),
    }
    for what, (name, metric) in latencies.items():
        ours = mean_ms(metric)
        yield Comparison(endpoint, what, found[name]["avg"], ours, LATENCY_TOLERANCE * ours + LATENCY_TOLERANCE_MS)


def _print(comparisons: list[Comparison]) -> int:
    table = Table("endpoint", "figure", "aiperf", "gateways", "", box=None)
    for each in comparisons:
        verdict = "agrees" if each.agrees else "DIFFERS"
        table.add_row(each.endpoint, each.what, f"{each.client:.1f}", f"{each.gateways:.1f}", verdict)
    Console(width=110).print(table)
    return 0 if all(each.agrees for each in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
