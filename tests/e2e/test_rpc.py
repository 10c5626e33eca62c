"""A cluster of real processes that asks its clients for certificates: HTTP and gRPC give the same answers."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import pytest
import trustme
import yaml

from gateway.rpc.statuses import ERROR_CODE
from proto.tandem.v1 import generate_pb2 as pb
from proto.tandem.v1.generate_pb2_grpc import GenerationStub
from tandem.cluster.state import StateDir
from tests.support.certificates import Authority, TlsFolder, chain_of
from tests.support.cluster import Cluster
from tests.support.documents import examples_of
from tests.support.gateway_server import parse_events
from tests.support.gateway_server import text_of as http_text_of
from tests.support.polling import until
from tests.support.rpc_gateway import text_of
from tests.support.source_tree import ROOT

if TYPE_CHECKING:
    from proto.tandem.v1.generate_pb2_grpc import GenerationAsyncStub

MODEL = "smollm2-135m-instruct"
QUESTION = "What is the capital of France?"
LONG_TEXT = "A quite unusual prompt about pelicans and their ways. " * 30

NUM_TOKENS = 60
IDS = [*range(100, 150)]

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class SecureCluster:
    """A cluster, and what a client needs to get in."""

    cluster: Cluster
    authority: Authority
    client: trustme.LeafCert
    flags: list[str]
    """What our own commands are told."""

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.cluster.port}"

    def channel(self) -> grpc.aio.Channel:
        credentials = self.authority.credentials(self.client)
        return grpc.aio.secure_channel(f"127.0.0.1:{self.cluster.rpc_port}", credentials)

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        connector = aiohttp.TCPConnector(ssl=self.authority.context(self.client))
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session,
            session.post(self.url + path, json=body) as response,
        ):
            assert response.status == 200, await response.text()
            return await response.read()


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    folder: Path = tmp_path_factory.mktemp("rpc")
    authority = Authority()
    client = authority.client()
    files = TlsFolder(folder, asks_clients=True).put(authority.server(), authority)
    assert files.client_ca is not None
    (folder / "own.pem").write_bytes(chain_of(client))
    (folder / "own.key").write_bytes(client.private_key_pem.bytes())
    tls = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-client-ca", str(files.client_ca)]
    flags = ["--ca", str(files.client_ca), "--client-cert", str(folder / "own.pem")]
    flags += ["--client-key", str(folder / "own.key")]
    cluster = Cluster(folder / "state", [*tls, "--gateways", "2", "--drain-s", "150"]).start()
    yield SecureCluster(cluster, authority, client, flags)
    cluster.stop()


@pytest.mark.parametrize(
    ("path", "http_prompt", "rpc_prompt"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": QUESTION}]},
            pb.GenerateRequest(chat=pb.Conversation(messages=[pb.Message(role="user", content=QUESTION)])),
        ),
        ("/v1/completions", {"prompt": LONG_TEXT}, pb.GenerateRequest(text=LONG_TEXT)),
        (
            "/v1/completions",
            {"prompt": [*range(100, 150)]},
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(100, 150))),
        ),
    ],
)
async def test_both_ways_give_the_same(
    secure: SecureCluster, path: str, http_prompt: dict[str, Any], rpc_prompt: pb.GenerateRequest
) -> None:
    sampling: dict[str, Any] = {"temperature": 0.7, "seed": 11, "max_tokens": 24}
    body = {"model": MODEL, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    events = parse_events(await secure.post(path, body | http_prompt | sampling | {"return_token_ids": True}))
    request = pb.GenerateRequest(model=MODEL, num_choices=2, wants_text=True, wants_token_ids=True)
    request.sampling.CopyFrom(pb.Sampling(**sampling))
    request.MergeFrom(rpc_prompt)
    async with secure.channel() as channel:
        answer = [message async for message in GenerationStub(channel).Generate(request, timeout=120)]
    for choice in (0, 1):
        own = [{**event, "choices": _of_choice(event, choice)} for event in events if event != "[DONE]"]
        assert text_of(answer, choice) == http_text_of(own) != ""
        ids = [token_id for event in own for part in event["choices"] for token_id in part.get("token_ids") or ()]
        assert ids == [i for message in answer if message.delta.choice == choice for i in message.delta.token_ids]
    usage, counts = answer[-1].usage, events[-2]["usage"]
    assert (usage.num_prompt_tokens, usage.num_generated_tokens) == (
        counts["prompt_tokens"],
        counts["completion_tokens"],
    )


def _of_choice(event: dict[str, Any], choice: int) -> list[dict[str, Any]]:
    return [part for part in event["choices"] if part["index"] == choice]


def test_the_documents_examples_with_certificates_work(secure: SecureCluster, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes(secure.authority.pem)
    (tmp_path / "own.pem").write_bytes(chain_of(secure.client))
    (tmp_path / "own.key").write_bytes(secure.client.private_key_pem.bytes())
    addresses = {"gateway.example:8001": f"127.0.0.1:{secure.cluster.rpc_port}"}
    printed = [
        example.run(addresses, tmp_path).split()[-1]
        for example in examples_of("docs/grpc.md")
        if "own.key" in example.text
    ]
    assert printed == [MODEL, "tandem.v1.Generation"]


def test_the_health_check_of_the_compose_file_asks_a_gateway_with_tls(secure: SecureCluster) -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    _, _, _, program = services["gateway"]["healthcheck"]["test"]
    state = StateDir(secure.cluster.state_dir).read_running()
    assert state is not None
    for folder, status in ((state.run_dir, 0), ("/nowhere", 1)):
        asked = program.replace("/run/tandem", folder)
        assert subprocess.run([sys.executable, "-c", asked], capture_output=True, check=False).returncode == status


def test_our_own_commands_get_in(secure: SecureCluster) -> None:
    rows = secure.cluster.status()["processes"]
    assert [row["health"] for row in rows if row["role"] == "gateway"] == ["ready", "ready"]
    sizes = ["--requests", "2", "--input-tokens", "8", "--output-tokens", "4", "--json"]
    result = secure.cluster.tandem("bench", "serve", "--url", secure.url, *secure.flags, *sizes)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["completed"] == 2
    refused = secure.cluster.tandem("bench", "serve", "--url", secure.url, *secure.flags[:2], *sizes)
    assert refused.returncode != 0


async def test_a_stream_outlives_a_rolling_restart_and_later_calls_find_the_next_gateway(secure: SecureCluster) -> None:
    async with secure.channel() as channel:
        stub: GenerationAsyncStub = GenerationStub(channel)
        request = pb.GenerateRequest(
            model=MODEL, text="Once upon a time", sampling=pb.Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
        )
        messages = aiter(stub.Generate(request, timeout=280))
        answer = [await anext(messages), await anext(messages)]
        reading = asyncio.create_task(_rest(messages, answer))
        before = {row["name"]: row["pid"] for row in secure.cluster.status()["processes"]}
        restart = asyncio.create_task(
            asyncio.to_thread(
                secure.cluster.tandem,
                *("restart", "--state-dir", str(secure.cluster.state_dir), "gateway-0", "gateway-1"),
                timeout_s=280,
            )
        )
        num_calls = num_given_back = 0

        async def lists_models() -> bool:
            nonlocal num_calls, num_given_back
            try:
                assert (await stub.ListModels(pb.ListModelsRequest(), timeout=30, wait_for_ready=True)).models
            except grpc.aio.AioRpcError as error:
                # By gRPC itself, which has told the client to connect elsewhere; no code of ours has seen the call.
                is_given_back = error.code() is grpc.StatusCode.CANCELLED
                if not is_given_back or ERROR_CODE in dict(error.trailing_metadata() or ()):
                    raise
                num_given_back += 1
                return False
            num_calls += 1
            return restart.done()

        await until(lists_models, "the restart is over", 280)
        assert restart.result().returncode == 0, restart.result().stderr
        await reading
    assert answer[-1].usage.num_generated_tokens == NUM_TOKENS
    after = {row["name"]: row["pid"] for row in secure.cluster.status()["processes"]}
    assert before["gateway-0"] != after["gateway-0"]
    assert before["gateway-1"] != after["gateway-1"]
    assert num_calls > 1
    assert num_given_back <= 2, "each listener closes once"


async def _rest(messages: Any, answer: list[pb.GenerateResponse]) -> None:
    answer += [message async for message in messages]
