"""The pure vocabulary of scheduling: sequences, plans and results; no tensors, no clock, no I/O."""
