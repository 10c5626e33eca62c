"""Attention over paged keys and values, for decoding tokens and prompt chunks in one batch."""
