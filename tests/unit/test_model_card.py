"""Model cards: what gateways learn about text from a Hugging Face directory and from a GGUF file."""

import zlib
from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors

from common.errors import ModelUnusable
from common.messages.codec import decode, encode
from common.messages.ids import Fingerprint, ModelName
from common.messages.registry import ModelCard
from common.model.card import build_card
from common.model.checkpoint import open_checkpoint
from common.model.locate import locate_model
from tests.support.tiny_gguf import USER_DEFINED, write_tiny_gguf
from tests.support.tiny_models import CHAT_TEMPLATE, edit_json, write_tiny_llama

TEXTS = {
    "english": "The quick brown fox isn't lazy.  It costs $1,234.56 today!",
    "code": "def f(x: int) -> int:\n\treturn x ** 2  # 100%\n\n\nprint(f(12))\n",
    "chinese": "北京今天有三十度。我们去公园。",
    "emoji": "ok 👩‍💻🎉 é ñ",
    "special": "<|im_start|>user\nhi<|im_end|>\n",
}


def card_of(path: Path) -> ModelCard:
    return build_card(
        open_checkpoint(path), model=ModelName("m"), fingerprint=Fingerprint("f"), max_context=1024, created=1700000000
    )


def tokenizer_of(card: ModelCard) -> Tokenizer:
    return Tokenizer.from_str(zlib.decompress(card.tokenizer).decode())


def token_ids(card: ModelCard, text: str) -> list[int]:
    ids: list[int] = tokenizer_of(card).encode(text, add_special_tokens=False).ids
    return ids


def add_bos_processor(path: Path) -> None:
    """Make the tokenizer in directory `path` put its BOS in front."""
    file = str(path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    bos = "<|im_start|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, 1)]
    )
    tokenizer.save(file)


class TestHuggingFaceDirectory:
    def test_card_holds_what_the_files_say(self, tmp_path: Path) -> None:
        card = card_of(write_tiny_llama(tmp_path / "tiny", vocab=300))
        assert (card.model, card.fingerprint, card.created) == ("m", "f", 1700000000)
        assert (card.vocab_size, card.max_context) == (300, 1024)
        assert (card.bos_token, card.eos_token, card.eos_ids) == ("<|im_start|>", "<|im_end|>", (2,))
        assert card.chat_template == CHAT_TEMPLATE
        assert not card.add_bos

    def test_card_survives_the_registry(self, tmp_path: Path) -> None:
        card = card_of(write_tiny_llama(tmp_path / "tiny"))
        assert decode(encode(card), ModelCard) == card

    @pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
    def test_tokenizer_round_trip(self, tmp_path: Path, text: str) -> None:
        tokenizer = tokenizer_of(card_of(write_tiny_llama(tmp_path / "tiny")))
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text

    def test_missing_or_damaged_tokenizer(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        (path / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelUnusable, match=r"tokenizer\.json: not a usable tokenizer"):
            card_of(path)
        (path / "tokenizer.json").unlink()
        with pytest.raises(ModelUnusable, match=r"tokenizer\.json: missing"):
            card_of(path)

    def test_truncation_and_padding_of_training_are_dropped(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        file = str(path / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=16)
        tokenizer.save(file)
        assert len(token_ids(card_of(path), "zzzzzzzz")) == 8


class TestEndOfSequence:
    """B098: every id that any file names ends the generation."""

    def test_union_of_generation_config_tokenizer_and_config(self, tmp_path: Path) -> None:
        assert card_of(write_tiny_llama(tmp_path / "tiny", eos=(2, 5), config_eos=7)).eos_ids == (2, 5, 7)

    def test_tokenizer_alone(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny", config_eos=None)
        (path / "generation_config.json").unlink()
        assert card_of(path).eos_ids == (2,)

    def test_lists_and_token_objects(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny", eos=9)
        edit_json(path / "config.json", eos_token_id=[7, 8])
        edit_json(path / "tokenizer_config.json", eos_token={"content": "<|endoftext|>", "special": True})
        card = card_of(path)
        assert card.eos_ids == (0, 7, 8, 9)
        assert card.eos_token == "<|endoftext|>"

    def test_defaults_of_the_config_class_are_not_taken(self, tmp_path: Path) -> None:
        """`LlamaConfig` would say 2 for a file that says nothing."""
        path = write_tiny_llama(tmp_path / "tiny", eos=5, config_eos=None)
        edit_json(path / "tokenizer_config.json", eos_token=None)
        assert card_of(path).eos_ids == (5,)

    @pytest.mark.parametrize("value", ["2", [2, "x"], True, -1])
    def test_no_token_id(self, tmp_path: Path, value: object) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        edit_json(path / "generation_config.json", eos_token_id=value)
        with pytest.raises(ModelUnusable, match="not a token id"):
            card_of(path)


class TestTemplateAndDefaults:
    def test_template_file_wins(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
        assert card_of(path).chat_template == "{{ messages[0].content }}"

    def test_named_templates(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
        edit_json(path / "tokenizer_config.json", chat_template=named)
        assert card_of(path).chat_template == "D"

    def test_no_template(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        edit_json(path / "tokenizer_config.json", chat_template=None)
        assert card_of(path).chat_template is None

    def test_sampling_defaults(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        plain = card_of(path)
        assert (plain.default_temperature, plain.default_top_p, plain.default_top_k) == (1.0, 1.0, 0)
        edit_json(path / "generation_config.json", temperature=0.6, top_p=0.9, top_k=50)
        card = card_of(path)
        assert (card.default_temperature, card.default_top_p, card.default_top_k) == (0.6, 0.9, 50)

    def test_unusable_sampling_default(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        edit_json(path / "generation_config.json", temperature="warm")
        with pytest.raises(ModelUnusable, match="temperature is 'warm'"):
            card_of(path)


class TestBos:
    """B099: the card tells whether plain text gets a BOS; encoding never adds one by itself."""

    def test_post_processor_decides(self, tmp_path: Path) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        edit_json(path / "tokenizer_config.json", add_bos_token=True)  # transformers ignores it beside tokenizer.json
        assert not card_of(path).add_bos
        add_bos_processor(path)
        card = card_of(path)
        assert card.add_bos
        assert 1 not in token_ids(card, "hello")

    def test_other_additions_are_reported(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = write_tiny_llama(tmp_path / "tiny")
        file = str(path / "tokenizer.json")
        tokenizer = Tokenizer.from_file(file)
        tokenizer.post_processor = processors.TemplateProcessing(
            single="$A <|im_end|>", pair="$A $B <|im_end|>", special_tokens=[("<|im_end|>", 2)]
        )
        tokenizer.save(file)
        assert not card_of(path).add_bos
        assert "other than one BOS" in caplog.text


@pytest.fixture(scope="module", name="card")
def bundled_card() -> ModelCard:
    return card_of(locate_model("smollm2"))


class TestBundledModel:
    def test_special_tokens(self, card: ModelCard) -> None:
        assert card.eos_ids == (2,)
        assert (card.bos_token, card.eos_token, card.add_bos) == ("<|im_start|>", "<|im_end|>", False)
        assert token_ids(card, "<|im_start|>user<|im_end|>") == [1, 4093, 2]
        assert card.vocab_size == 49152

    def test_digits_are_split_one_by_one(self, card: ModelCard) -> None:
        encoding = tokenizer_of(card).encode("12345 678", add_special_tokens=False)
        assert encoding.tokens == ["1", "2", "3", "4", "5", "Ġ", "6", "7", "8"]

    @pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
    def test_round_trip(self, card: ModelCard, text: str) -> None:
        assert tokenizer_of(card).decode(token_ids(card, text), skip_special_tokens=False) == text

    def test_special_tokens_are_hidden_when_skipped(self, card: ModelCard) -> None:
        assert tokenizer_of(card).decode(token_ids(card, TEXTS["special"]), skip_special_tokens=True) == "user\nhi\n"

    def test_chat_template(self, card: ModelCard) -> None:
        assert card.chat_template is not None
        assert "<|im_start|>" in card.chat_template


class TestGguf:
    def card_with(self, tmp_path: Path, **changes: object) -> ModelCard:
        keys = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        source = write_tiny_llama(tmp_path / "tiny")
        return card_of(write_tiny_gguf(tmp_path / "tiny.gguf", source, changes=keys))

    @pytest.mark.parametrize("text", [text for key, text in TEXTS.items() if key != "code"])
    def test_same_ids_as_the_tokenizer_it_was_made_from(self, tmp_path: Path, text: str) -> None:
        card = self.card_with(tmp_path, pre="gpt-2")
        assert token_ids(card, text) == token_ids(card_of(tmp_path / "tiny"), text)

    @pytest.mark.parametrize(
        ("pre", "pieces"),
        [
            ("gpt-2", ["Ġ", "it", "'s", "Ġ12345", "!!"]),
            ("smollm", ["Ġ", "it", "'s", "Ġ", "1", "2", "3", "4", "5", "!!"]),
            ("llama-bpe", ["Ġ", "it", "'s", "Ġ", "123", "45", "!!"]),
            ("default", ["Ġ", "it", "'", "s", "Ġ", "123", "45", "!!"]),
        ],
    )
    def test_pre_tokenizers(self, tmp_path: Path, pre: str, pieces: list[str]) -> None:
        splitter = tokenizer_of(self.card_with(tmp_path, pre=pre)).pre_tokenizer
        assert splitter is not None
        text = "it's 12345!!"
        assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == pieces[1:]

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"pre": "tekken"}, "pre-tokenizer tekken is not supported"),
            ({"pre": None}, r"tokenizer\.ggml\.pre is missing"),
            ({"model": "llama"}, "tokenizer model llama is not supported"),
            ({"merges": ["ab"]}, "merge 'ab' is not a pair"),
            ({"merges": ["nothere either"]}, "cannot be rebuilt"),
            ({"token_type": [1, 1]}, "320 tokens, but 2 token types"),
            ({"eos_token_id": 4000}, "eos_token_id is 4000, but there are 320 tokens"),
        ],
    )
    def test_refusals(self, tmp_path: Path, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ModelUnusable, match=message):
            self.card_with(tmp_path, **changes)

    def test_end_of_turn_joins_the_eos_set(self, tmp_path: Path) -> None:
        card = self.card_with(tmp_path, eos_token_id=0, eot_token_id=30)
        assert card.eos_ids == (0, 2, 30)
        assert card.eos_token == "<|endoftext|>"

    def test_bos_by_file_or_by_kind(self, tmp_path: Path) -> None:
        assert not self.card_with(tmp_path, pre="smollm").add_bos
        assert self.card_with(tmp_path, pre="smollm", add_bos_token=True).add_bos
        assert self.card_with(tmp_path, pre="llama-bpe").add_bos
        assert not self.card_with(tmp_path, pre="llama-bpe", add_bos_token=False).add_bos
        assert not self.card_with(tmp_path, pre="llama-bpe", bos_token_id=None).add_bos

    def test_user_defined_tokens_are_whole_but_not_special(self, tmp_path: Path) -> None:
        source = write_tiny_llama(tmp_path / "tiny")
        card = card_of(write_tiny_gguf(tmp_path / "tiny.gguf", source, token_types={"th": USER_DEFINED}))
        tokenizer = tokenizer_of(card)
        ids = token_ids(card, "math")
        assert tokenizer.token_to_id("th") in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == "math"
