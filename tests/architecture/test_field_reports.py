"""Reports from the field about the hand-over, Redis and API keys stay tests: each is named by at least one."""

import ast

import pytest

from tests.support.source_tree import python_files

REPORTS = {
    "b036": "decode blocks of an aborted reception are never reclaimed",
    "b038": "pages of an aborted reception are freed while a write into them runs",
    "b039": "a lease has ended, and the pages are read all the same",
    "b042": "prefill aborts, decoding goes on from incomplete pages",
    "b043": "a pair that does not fit is found out at the first transfer, and the client hangs",
    "b044": "different tensor parallelism permutes the heads",
    "b048": "a peer restarts at its address, and what was known about the old one is used",
    "b049": "a client that leaves before the first token does not stop its prefill",
    "b050": "a worker leaves while a request is assigned to it and has not been answered",
    "b051": "the first token is the last one, and another step is computed",
    "b052": "seed, penalties or the first token are lost at the hand-over",
    "b053": "what came over the wire counts as cached",
    "b054": "messages of an earlier try hit a later one, finished work comes back",
    "b104": "a place is lost when a stream is cancelled or times out",
    "b106": "a refused request uses up another limit",
    "b115": "entries of a crashed consumer are never claimed",
    "b116": "removing a consumer drops its entries; a poison message goes round for ever",
    "b117": "a reader ends with its connection",
    "b118": "a group or stream that vanished stays so",
    "b119": "a cancelled command leaves its reply for the next one",
    "b121": "acknowledged entries stay in memory",
    "b139": "keys are asked for at some paths only",
}


@pytest.fixture(scope="module")
def names() -> list[str]:
    """The names of all tests."""
    return [
        node.name
        for path in python_files("tests")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@pytest.mark.parametrize("report", REPORTS)
def test_a_test_bears_its_name(report: str, names: list[str]) -> None:
    assert [name for name in names if name.startswith(f"test_{report}_")], REPORTS[report]
