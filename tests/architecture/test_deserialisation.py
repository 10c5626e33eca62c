"""Nothing that faces a network or a model file can be talked into running code: no pickle and no kin of it."""

import ast
from collections.abc import Iterator

import pytest

from tests.support.source_tree import PACKAGES, ROOT, python_files

FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "jsonpickle",
    "marshal",
    "shelve",
    "multiprocessing.connection",
    "multiprocessing.managers",
    "multiprocessing.reduction",
    "torch.multiprocessing",
}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.full_load",
    "yaml.unsafe_load",
    "jinja2.Environment",
    "jinja2.Template",
}
FORBIDDEN_ARGUMENTS = {"allow_pickle", "trust_remote_code"}


def test_b131_no_package_deserialises_code() -> None:
    files = python_files(*PACKAGES)
    found = {path.relative_to(ROOT).as_posix(): list(_violations(path.read_text(encoding="utf-8"))) for path in files}
    assert {name: violations for name, violations in found.items() if violations} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as safe",
        "from pickle import loads",
        "from multiprocessing.connection import Listener",
        "from multiprocessing import connection",
        "def f(x):\n    return eval(x)",
        "import torch\ntorch.load(path)",
        "import torch as t\nt.load(path)",
        "from torch import load\nload(path)",
        "import yaml\nyaml.load(text, yaml.Loader)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "from jinja2 import Environment as E\nE()",
    ],
)
def test_the_scan_sees(source: str) -> None:
    assert list(_violations(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "import re\nre.compile('x')",
        "import yaml\nyaml.safe_load(text)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "from jinja2.sandbox import ImmutableSandboxedEnvironment\nImmutableSandboxedEnvironment()",
        "import json\njson.load(file)",
    ],
)
def test_the_scan_leaves_alone(source: str) -> None:
    assert list(_violations(source)) == []


def _violations(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    imported = dict(_imports(tree))
    yield from (f"imports {path}" for path in imported.values() if _is_forbidden_module(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            path = _full_path(node.func, imported)
            if path in FORBIDDEN_CALLS:
                yield f"line {node.lineno}: {path}"
            yield from (f"line {node.lineno}: {name}" for name in _forbidden_arguments(node))


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Each imported name with the dotted path that it stands for."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((each.asname or each.name.partition(".")[0], each.name) for each in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((each.asname or each.name, f"{module}.{each.name}") for each in names)
            case _:
                pass


def _is_forbidden_module(path: str) -> bool:
    return any(path == module or path.startswith(f"{module}.") for module in FORBIDDEN_MODULES)


def _full_path(function: ast.expr, imported: dict[str, str]) -> str:
    first, *rest = ast.unparse(function).split(".")
    return ".".join([imported.get(first, first), *rest])


def _forbidden_arguments(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in FORBIDDEN_ARGUMENTS and not is_off:
            yield keyword.arg or ""
