"""Limits of grammars that hold before anything is compiled. Loads no library."""

MAX_GRAMMAR_BYTES = 128 * 1024
"""Of a grammar's JSON form. A job waits in Redis with it, and llguidance needs 0.5 s for 330 KB of alternatives."""
