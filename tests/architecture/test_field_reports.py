"""Reports from the field about what clients and operators see stay tests: each is named by at least one."""

import ast

import pytest

from tests.support.source_tree import python_files

REPORTS = {
    "b001": "a stream ends with neither a reason nor [DONE]",
    "b002": "several choices end a stream several times",
    "b005": "the reason of an end is made up",
    "b006": "a stop string that spans tokens leaks",
    "b008": "characters are broken where tokens end",
    "b009": "an answer is cut in the middle of a character",
    "b010": "logprobs of chats have the shape of those of texts",
    "b012": "infinities in logprobs make JSON that is none",
    "b014": "choices have wrong numbers",
    "b015": "a client that leaves does not end its generation",
    "b017": "counts of usage are wrong for streams, choices and lists of prompts",
    "b018": "chunks of one answer do not agree on what it is",
    "b019": "an empty prompt stops an engine",
    "b020": "ids outside the vocabulary",
    "b022": "ids to stop at write into the row of a neighbour",
    "b023": "a seed outside the generator's range",
    "b024": "prompt and max_tokens at the border of the context",
    "b026": "null where a field may be null",
    "b028": "stop, n, and types that look alike",
    "b030": "null becomes the word None; broken arguments of old calls",
    "b031": "numbers at their edges",
    "b032": "a schema or expression stops an engine",
    "b034": "bodies of a protocol that is not served",
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
    "b071": "temperature, top-k and top-p in a wrong order",
    "b073": "filters leave no token",
    "b075": "penalties over the wrong tokens",
    "b076": "a bias without effect, or for some choices alone",
    "b078": "logits that are no numbers become a token",
    "b079": "min-p applied to logits",
    "b104": "a place is lost when a stream is cancelled or times out",
    "b106": "a refused request uses up another limit",
    "b107": "a slow reader fills memory, is cut, or holds its writer",
    "b109": "shutting down cuts streams, or waits for them for ever",
    "b110": "healthy while the engine is dead",
    "b112": "not healthy only because prefills are long",
    "b113": "proxies drop a quiet stream",
    "b115": "entries of a crashed consumer are never claimed",
    "b116": "removing a consumer drops its entries; a poison message goes round for ever",
    "b117": "a reader ends with its connection",
    "b118": "a group or stream that vanished stays so",
    "b119": "a cancelled command leaves its reply for the next one",
    "b121": "acknowledged entries stay in memory",
    "b131": "bytes from a network are unpickled",
    "b133": "a URL in a message makes the gateway ask others",
    "b134": "a request brings its own template",
    "b135": "a template of a model runs code",
    "b139": "keys are asked for at some paths only",
    "b140": "headers that are too many, too long, or are repeated to others",
    "b141": "a short compressed body is a long one",
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
    assert [name for name in names if f"_{report}_" in name], REPORTS[report]
