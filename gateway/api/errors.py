"""The root of every request: an answer to whatever goes wrong in it."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web
from aiohttp.hdrs import CONTENT_TYPE

from common.errors import (
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    RequestError,
    RouteNotFound,
)
from gateway.api.keys import ERROR_CODE, EVENT_STREAM, SERVICE
from gateway.error_notes import note_error
from gateway.problems import Problem, problem_of
from gateway.sse import EventStream

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

JSON_TYPE = "application/json; charset=utf-8"

MAX_PATH_CHARS = 100
"""So much of an unknown path is repeated to its client."""


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Serve a request; every exception but a vanished client becomes an answer or the last event of a stream."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _refuse(request, error)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:  # noqa: BLE001 - the root of the request: nothing may leave it unanswered
        return await _answer(request, error)


def json_response(body: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return `body` as JSON."""
    return encoded_response(msgspec.json.encode(body), status, headers)


def encoded_response(body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return `body`, which is JSON."""
    # Not by `content_type` and `charset`, which aiohttp would read and write again.
    return web.Response(body=body, status=status, headers={CONTENT_TYPE: JSON_TYPE, **(headers or {})})


async def _answer(request: web.Request, error: Exception) -> web.StreamResponse:
    problem = problem_of(error)
    _note(request, error, problem)
    stream: EventStream | None = request.get(EVENT_STREAM)
    if stream is not None and stream.response is not None:
        return await stream.fail(problem.body)
    return _problem_response(problem)


def _refuse(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    """Answer what aiohttp's router refuses."""
    path = request.path[:MAX_PATH_CHARS]
    refusal: RequestError
    headers: dict[str, str] = {}
    match error:
        case web.HTTPNotFound():
            refusal = RouteNotFound(f"There is no {path}.")
        case web.HTTPMethodNotAllowed():
            refusal = MethodNotAllowed(f"{path} does not take {error.method[:MAX_PATH_CHARS]}.")
            headers = {"Allow": ", ".join(sorted(error.allowed_methods))}
        case web.HTTPRequestEntityTooLarge():
            refusal = BodyTooLarge("The body is too large.")
        case _:
            refusal = InvalidRequest(error.reason)
    return _problem_response(problem_of(refusal), headers)


def _problem_response(problem: Problem, headers: dict[str, str] | None = None) -> web.Response:
    return json_response(problem.body, problem.status, {**problem.headers, **(headers or {})})


def _note(request: web.Request, error: Exception, problem: Problem) -> None:
    """Log the error, once, and count it; `ERROR_CODE` is for those that are not the client's."""
    if note_error(request.app[SERVICE].metrics, error, problem):
        request[ERROR_CODE] = problem.code
