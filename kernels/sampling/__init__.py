"""Choice of the next token: a pure function of logits, parameters, history, seed and position."""
