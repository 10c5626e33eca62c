"""No process decodes bytes with something that can run code: not from a socket, not from a file."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("common", "gateway", "prefill_worker", "decode_worker", "kernels", "tandem", "deploy")
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle"}
CALLS = {"torch.load", "yaml.load", "numpy.load", "np.load", "joblib.load", "eval", "exec"}

SOURCES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def findings(source: str) -> Iterator[str]:
    """Yield every forbidden import and call in a module."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield module
            case ast.Call(func=function) if ast.unparse(function) in CALLS:
                yield ast.unparse(function)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_decodes_nothing_that_runs_code(path: Path) -> None:
    assert list(findings(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source", ["import pickle", "from marshal import loads", "import torch\ntorch.load('x', weights_only=False)"]
)
def test_the_check_finds_what_it_looks_for(source: str) -> None:
    assert list(findings(source))
