"""API keys: how they are made and recognised, and where a cluster keeps what it knows of them."""
