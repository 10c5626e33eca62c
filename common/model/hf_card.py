"""What a Hugging Face directory says about text: tokenizer.json and the small JSON files around it."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.errors import ModelUnusable
from common.model.card_source import CardSource
from common.model.hf_config import read_json

_log = logging.getLogger(__name__)

_PROBE = "a"
"""Any text: what encoding it with special tokens adds tells what the post-processor does."""


def read_card_source(path: Path) -> CardSource:
    """Return what directory `path` says about text; raise `ModelUnusable` if it has no usable tokenizer.json."""
    tokenizer = _read_tokenizer(path / "tokenizer.json")
    settings = {**_read_optional(path / "special_tokens_map.json"), **_read_optional(path / "tokenizer_config.json")}
    generation = _read_optional(path / "generation_config.json")
    bos, eos = _token_text(settings.get("bos_token")), _token_text(settings.get("eos_token"))
    declared = (read_json(path / "config.json").get("eos_token_id"), generation.get("eos_token_id"))
    return CardSource(
        tokenizer_json=tokenizer.to_str(),
        chat_template=_chat_template(path, settings),
        bos_token=bos,
        eos_token=eos,
        eos_ids=_union(path, (tokenizer.token_to_id(eos), *declared)),
        add_bos=_adds_bos(path, tokenizer, tokenizer.token_to_id(bos)),
        temperature=_number(path, generation, "temperature", 1.0),
        top_p=_number(path, generation, "top_p", 1.0),
        top_k=int(_number(path, generation, "top_k", 0)),
    )


def _read_tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        raise ModelUnusable(f"{file}: missing; a fast tokenizer is required (other tokenizer files are not read)")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for any damage
        raise ModelUnusable(f"{file}: not a usable tokenizer ({error})") from error
    # Remains of training, which would cut or pad prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _token_text(token: object) -> str:
    """A special token is written as its text, or as an object with its text as `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    """The file wins over the setting; of several named templates "default" is the one for chat."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _union(path: Path, declared: Iterable[object]) -> tuple[int, ...]:
    """Unite ids that files name as nothing, one id or a list of ids: generation must stop at each of them."""
    ids: set[int] = set()
    for value in declared:
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if not isinstance(item, int) or isinstance(item, bool) or item < 0:
                raise ModelUnusable(f"{path}: eos_token_id names {item!r}, which is not a token id")
            ids.add(item)
    return tuple(sorted(ids))


def _adds_bos(path: Path, tokenizer: Tokenizer, bos_id: int | None) -> bool:
    plain = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    wrapped = tokenizer.encode(_PROBE, add_special_tokens=True).ids
    adds_bos = bos_id is not None and wrapped[:1] == [bos_id] and plain[:1] != [bos_id]
    if len(wrapped) - len(plain) != int(adds_bos):
        _log.warning("%s: the tokenizer adds special tokens other than one BOS in front; they are left out", path)
    return adds_bos


def _number(path: Path, generation: Mapping[str, Any], key: str, default: float) -> float:
    value = generation.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ModelUnusable(f"{path / 'generation_config.json'}: {key} is {value!r}, not a number >= 0")
    return value
