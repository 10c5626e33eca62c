"""Load on a running gateway, and what it did under it."""
