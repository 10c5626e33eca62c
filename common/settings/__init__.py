"""How a process learns its settings: frozen dataclasses, read once at start from flags and `TANDEM_*` variables."""
