"""What is answered to bytes that are no HTTP request, or no acceptable one: the error object, like to everybody else.

They never become a request that a handler or a middleware sees, so this is done where the bytes are read. Nothing of
them is repeated.
"""

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from gateway.api.errors import json_response
from gateway.problems import INTERNAL_MESSAGE
from gateway.request_ids import HEADER, new_request_id
from gateway.schemas.errors import ErrorBody, ErrorDetail

MALFORMED = ErrorDetail("The request is not valid HTTP.", "invalid_request_error", code="malformed_http")
TOO_LONG = ErrorDetail("The request line or a header is too long.", "invalid_request_error", code="header_too_large")
NOT_EXPECTED = ErrorDetail("Of `Expect` only 100-continue is known.", "invalid_request_error", code="unknown_expect")
MISTAKE = ErrorDetail(INTERNAL_MESSAGE, "server_error", code="internal_error")


class Connection(RequestHandler):
    """One connection of a client."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer, and end the connection behind it; raises `ConnectionError` if another one has begun."""
        response = super().handle_error(request, status, exc, message)  # notes it in the log
        if isinstance(exc, LineTooLong):
            response = json_response(ErrorBody(TOO_LONG), 431)
        elif status < 500:
            response = json_response(ErrorBody(MALFORMED), status)
        else:
            response = json_response(ErrorBody(MISTAKE), status)
        response.headers[HEADER] = new_request_id()
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the answer; the one to an unknown `Expect` comes from no handler, and would repeat it."""
        if resp.status == web.HTTPExpectationFailed.status_code:
            resp = json_response(ErrorBody(NOT_EXPECTED), resp.status)
        return await super().finish_response(request, resp, start_time)


class Connections(web.Server):
    """Makes a `Connection` for every client."""

    def __call__(self) -> RequestHandler:
        """Return the protocol of a new connection."""
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs the application on such connections."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = Connections  # the application makes no other kind, and knows no way to ask for one
        return server
