"""What a checkpoint says about text: its tokenizer, its chat template, and how it wants to be sampled."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CardSource:
    """The part of a model card that comes out of a checkpoint.

    `tokenizer_json` is a tokenizer.json without truncation or padding. `eos_ids` is ascending. `bos_token`/`eos_token`
    are the texts that a chat template may use, "" when there is none.

    `add_bos`: the model expects its BOS in front of plain text. Whoever tokenises always encodes with
    `add_special_tokens=False` and does the rest itself: a plain-text completion gets the BOS id in front when `add_bos`
    is set; a rendered chat template is taken as it is, for the template writes the BOS; token ids are left untouched.
    So nothing ever gets two of them.
    """

    tokenizer_json: str
    chat_template: str | None
    bos_token: str
    eos_token: str
    eos_ids: tuple[int, ...]
    add_bos: bool
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
