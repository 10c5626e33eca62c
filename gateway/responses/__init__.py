"""The Responses API: its items in, its items and events out. What is between them is a chat like any other."""
