"""The OpenAI error object."""

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, for people (`message`) and programs (`type`, `param`, `code`)."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of every answer that is not a success, and of the event that ends a broken stream."""

    error: ErrorDetail
