"""The model of the soak: that of the fault tests, with a tokenizer that also splits texts, so that chats differ."""

from pathlib import Path

from tokenizers import Regex, Tokenizer, pre_tokenizers

from tests.support.fault_model import write_fault_model

WORD = r"\d+ "
"""How a token reads."""


def write_soak_model(path: Path) -> Path:
    """Write a checkpoint for which the text "17 23 " is the tokens 17 and 23, and anything else one unknown token."""
    write_fault_model(path)
    file = str(path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(WORD), behavior="isolated")
    tokenizer.save(file)
    return path
