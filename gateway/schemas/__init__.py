"""The JSON of the OpenAI API as types: what clients send and what they get."""
