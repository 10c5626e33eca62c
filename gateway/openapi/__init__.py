"""The description of the HTTP API, made of the types that requests are decoded to and answers are encoded from."""
