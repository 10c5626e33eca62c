"""The gateway: clients' connections, text to token ids and back, and each request until its terminal event."""
