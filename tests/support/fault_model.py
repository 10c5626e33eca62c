"""The model of the fault tests: tiny, fp32, and with a tokenizer whose texts tell the tokens apart."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.support.tiny_models import SPECIAL_TOKENS, write_tiny_llama

VOCAB = 320
MAX_CONTEXT = 2048


def write_fault_model(path: Path) -> Path:
    """Write a checkpoint whose token 17 reads "17 ": equal texts are equal tokens."""
    write_tiny_llama(path, vocab=VOCAB, num_layers=4, max_position=MAX_CONTEXT)
    words = {f"{token} ": token for token in range(len(SPECIAL_TOKENS), VOCAB)}
    special = {text: token for token, text in enumerate(SPECIAL_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocab=special | words, unk_token=SPECIAL_TOKENS[0]))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # grammars need to know the kind
    tokenizer.save(str(path / "tokenizer.json"))
    return path
