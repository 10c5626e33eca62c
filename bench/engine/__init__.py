"""How long a step of the engine takes, beside what the machine allows: `python -m bench.engine`."""
