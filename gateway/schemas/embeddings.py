"""`/v1/embeddings`: the request, so that it can be refused for the right reason."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta


class EmbeddingRequest(msgspec.Struct, frozen=True):
    """Body of a request for embeddings. `input`: a text, token ids, or a list of texts or of lists of ids."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: str | None = None
