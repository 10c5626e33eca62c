"""What the answers of a request must match: the fields that say it, and the processes that compile it."""
