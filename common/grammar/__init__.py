"""Grammars of answers, as gateways and workers have to see them alike: one tokenizer, one set of limits."""
