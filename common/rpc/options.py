"""What both ends of an internal call agree on."""

SECRET_KEY = "tandem-secret"

MAX_MESSAGE_BYTES = 16 << 20
"""The largest message is a prompt: 4 million ids."""

COMMON_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
