"""The program of a compiler process: compiles what strangers send, and may be killed for it.

    python -m gateway.guidance.compiler_process <pid of the gateway>      (its socket is file descriptor 0)

Its memory is limited, and its stack is smaller than those that a worker compiles and computes masks with: a grammar
that exhausts either ends this process, and not a gateway or a worker.
"""

import resource
import socket
import sys
import threading
from collections import OrderedDict
from io import BufferedReader
from typing import assert_never

import msgspec
from llguidance import LLTokenizer

from common.errors import InvalidGrammar, ModelUnusable
from common.grammar.matcher import compile_matcher
from common.grammar.tokenizer import grammar_tokenizer
from common.lifecycle.orphan import die_with_parent
from gateway.guidance.orders import (
    LENGTH_BYTES,
    Compile,
    Compiled,
    Load,
    Loaded,
    Order,
    Refused,
    Reply,
    TokenizerId,
    Unknown,
    Unusable,
    frame,
    order_decoder,
)
from gateway.guidance.text import grammar_text

MEMORY_BYTES = 4 << 30
"""Of address space: a vocabulary of 256,000 tokens takes 0.3 GB."""

STACK_BYTES = 4 << 20

MAX_TOKENIZERS = 4


class CompilerDesk:
    """Answers orders one after the other."""

    def __init__(self) -> None:
        self._tokenizers: OrderedDict[TokenizerId, LLTokenizer] = OrderedDict()

    def obey(self, order: Order) -> Reply:
        """Return the answer, whatever was ordered."""
        match order:
            case Load():
                return self._load(order)
            case Compile(tokenizer, _) if tokenizer not in self._tokenizers:
                return Unknown()
            case Compile():
                return self._compile(order)
            case _:
                assert_never(order)

    def _load(self, order: Load) -> Reply:
        try:
            self._tokenizers[order.id] = grammar_tokenizer(order.tokenizer, order.vocab_size, order.eos_ids)
        except ModelUnusable as error:
            return Unusable(str(error))
        if len(self._tokenizers) > MAX_TOKENIZERS:
            self._tokenizers.popitem(last=False)
        return Loaded()

    def _compile(self, order: Compile) -> Reply:
        self._tokenizers.move_to_end(order.tokenizer)
        try:
            grammar = grammar_text(order.source)
            compile_matcher(self._tokenizers[order.tokenizer], grammar)
        except InvalidGrammar as error:
            return Refused(error.message)
        return Compiled(grammar)


def main() -> int:
    """Serve until the gateway hangs up."""
    if not die_with_parent(int(sys.argv[1])):
        return 1
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    with socket.socket(fileno=0) as connection:
        thread = threading.Thread(target=_serve, args=(connection,), name="compiler")
        thread.start()
        thread.join()
    return 0


def _serve(connection: socket.socket) -> None:
    desk = CompilerDesk()
    with connection.makefile("rb") as orders:
        while (order := _next(orders)) is not None:
            connection.sendall(frame(desk.obey(order)))


def _next(orders: BufferedReader) -> Order | None:
    length = orders.read(LENGTH_BYTES)
    if len(length) < LENGTH_BYTES:
        return None
    try:
        return order_decoder.decode(orders.read(int.from_bytes(length, "big")))
    except msgspec.DecodeError:  # the gateway was killed in the middle of its order
        return None


if __name__ == "__main__":
    sys.exit(main())
