"""The subcommands of `tandem`, one module each with a `run(argv)` that returns the exit code."""
