"""One thing that the HTTP API can do, as far as its description tells."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from gateway.unsupported import Refusal

CLIENT_CLOSED = 499
"""The answer was cancelled by its id; HTTP has no status of its own for it."""

ANY_ROUTE = (400, 500)
ANY_BODY = (413, 415)
ANY_MODEL = (404, 503)
GENERATION = (CLIENT_CLOSED, 504)
WITH_KEY = (401,)
WITH_LIMITS = (403, 429)

REASONS: Mapping[int, str] = {
    400: "The request cannot be served as sent; `param` names the field, if one is to blame.",
    401: "No API key, or one that is not known.",
    403: "The API key is not good for this model or this priority.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is compressed, or no JSON.",
    429: "A limit of the API key is reached.",
    CLIENT_CLOSED: "Somebody has cancelled the request by its id.",
    500: "The server made a mistake.",
    503: "Nobody can serve this now; the same request may be sent again.",
    504: "The time of the request is over.",
}
"""What an error says. Its body is the same for all."""


def reason_of(status: int) -> str:
    """Return what a status says."""
    return REASONS.get(status) or HTTPStatus(status).phrase


@dataclass(frozen=True, slots=True)
class Operation:
    """A method at a path. `request`, `answer` and `event` are types of JSON: of the body, of the answer, and of one
    event if the answer is streamed. `text` is what the answer is if it is no JSON. `more` are further answers.

    `names_events`: every event has a name, the errors too. `is_open`: it needs no API key. `refused` are fields that
    are known but not served.
    """

    method: str
    path: str
    name: str
    summary: str
    errors: tuple[int, ...]
    request: Any = None
    answer: Any = None
    event: Any = None
    text: str | None = None
    more: Mapping[int, Any] = field(default_factory=dict)
    names_events: bool = False
    is_open: bool = False
    refused: Mapping[str, Refusal] = field(default_factory=dict)

    @property
    def types(self) -> list[Any]:
        """All types of JSON."""
        found = [self.request, self.answer, self.event, *self.more.values()]
        return [kind for kind in found if kind is not None]

    @property
    def generates(self) -> bool:
        """Whether a model writes the answer."""
        return self.event is not None
