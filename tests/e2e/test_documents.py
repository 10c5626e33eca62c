"""The examples of README and of the documents do what they show, word for word but for addresses and ids.

Those that need certificates are in `test_rpc`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.documents import Example, examples_of

DOCUMENTS = ("README.md", "docs/completions.md", "docs/grpc.md", "docs/tools-and-reasoning.md")
EXAMPLES = [
    example for document in DOCUMENTS for example in examples_of(document) if "gateway.example" not in example.text
]

pytestmark = [pytest.mark.e2e, pytest.mark.redis, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("documents")).start()
    yield running
    running.stop()


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_the_example_works(cluster: Cluster, example: Example, tmp_path: Path) -> None:
    addresses = {"127.0.0.1:8000": f"127.0.0.1:{cluster.port}", "127.0.0.1:8001": f"127.0.0.1:{cluster.rpc_port}"}
    assert example.run(addresses, tmp_path).strip()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_each_document_has_examples(document: str) -> None:
    assert document in {example.document for example in EXAMPLES}
