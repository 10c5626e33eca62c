"""What every scripted answer says: the first tokens of one text, as ids, as text, and as events on both wires.

All answers are beginnings of the same text, so that their events are made once, before anything is measured: making
them costs whoever plays worker or upstream next to nothing, and whoever reads an answer knows every byte of it.
"""

import itertools
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common.messages.chain import EMPTY_CHAIN, extend_chain
from common.messages.ids import Fingerprint, ModelName
from common.messages.registry import ModelCard
from proto import worker_pb2 as pb

MODEL = ModelName("scripted")
FINGERPRINT = Fingerprint("scripted")
MAX_CONTEXT = 8192
NUM_TOKENS = 4096
VOCAB_SIZE = 4000

STOPS = ["###", "<|end|>"]
"""Stop strings that the text does not hold: it has to be searched all the same. No beginning of them occurs either, so
that nothing is held back and every token is an event."""

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True)
class Script:
    """One text of `NUM_TOKENS` tokens: `pieces` are the texts that its `ids` stand for."""

    tokenizer_json: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...]

    @property
    def card(self) -> ModelCard:
        """What a worker publishes that says nothing else."""
        return ModelCard(
            model=MODEL,
            fingerprint=FINGERPRINT,
            tokenizer=zlib.compress(self.tokenizer_json.encode()),
            vocab_size=VOCAB_SIZE,
            max_context=MAX_CONTEXT,
            eos_ids=(),
            created=0,
            chat_template=CHAT_TEMPLATE,
        )

    def text(self, num_tokens: int) -> str:
        """Return an answer of so many tokens."""
        return "".join(self.pieces[:num_tokens])

    @cached_property
    def feed_events(self) -> tuple[bytes, ...]:
        """Field `tokens` of a `FeedEvent` for each token."""
        chains = itertools.accumulate(self.ids, extend_chain, initial=EMPTY_CHAIN)
        messages = [
            pb.FeedEvent(tokens=pb.Tokens(index=index, ids=[token_id], chain=chain))
            for index, (token_id, chain) in enumerate(zip(self.ids, chains, strict=False))
        ]
        messages[0].tokens.num_cached_tokens = 0
        return tuple(message.SerializeToString() for message in messages)

    @cached_property
    def sse_chunks(self) -> tuple[bytes, ...]:
        """Events of an OpenAI chat stream, one per token, each in an HTTP chunk of its own as servers send them."""
        return tuple(http_chunk(_chunk({"content": piece})) for piece in self.pieces)


OPENING = {"role": "assistant", "content": ""}


def sse_opening() -> bytes:
    """Return the HTTP chunk that begins an OpenAI chat stream."""
    return http_chunk(_chunk(OPENING))


def sse_ending() -> bytes:
    """Return the HTTP chunks that end one."""
    return http_chunk(_chunk({}, "length")) + http_chunk(b"data: [DONE]\n\n") + http_chunk(b"")


def http_chunk(content: bytes) -> bytes:
    """Return one chunk of a body; an empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(content), content)


def whole_answer(text: str, num_tokens: int) -> bytes:
    """Return a chat answer that is not streamed."""
    return msgspec.json.encode(
        {
            "id": "chatcmpl-scripted",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text},
                    "logprobs": None,
                    "finish_reason": "length",
                }
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1},
        }
    )


def make_script() -> Script:
    """Return the script, made of this project's licence: a tokenizer is trained on it, byte-level like most."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="ascii")
    assert not any(stop[0] in text for stop in STOPS)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text], trainer)
    ids = list(itertools.islice(itertools.cycle(tokenizer.encode(text).ids), NUM_TOKENS))
    pieces = {token_id: tokenizer.decode([token_id]) for token_id in set(ids)}
    return Script(tokenizer.to_str(), tuple(ids), tuple(pieces[token_id] for token_id in ids))


def _chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-scripted-0123456789abcdef0123456789ab",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
    }
    return b"data: %b\n\n" % msgspec.json.encode(chunk)
