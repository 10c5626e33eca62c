"""Everything that the HTTP API can do. A route without a row here, or a row without a route, fails a test."""

from typing import Any

from gateway.api.authenticating import METRICS_ROUTE, OPEN_ROUTES
from gateway.openapi.operation import ANY_BODY, ANY_MODEL, ANY_ROUTE, GENERATION, WITH_KEY, WITH_LIMITS, Operation
from gateway.schemas.chat import ChatChunk, ChatCompletion, ChatRequest
from gateway.schemas.completions import CompletionRequest, TextCompletion
from gateway.schemas.embeddings import EmbeddingRequest
from gateway.schemas.health import Health
from gateway.schemas.models import ModelEntry, ModelList
from gateway.schemas.responses import Response, ResponseEvent, ResponseRequest
from gateway.schemas.tokens import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from gateway.schemas.version import Version
from gateway.unsupported import CHAT_REFUSED, COMPLETION_REFUSED, RESPONSE_REFUSED, TOKENIZE_REFUSED

_GENERATED = (*ANY_ROUTE, *WITH_KEY, *WITH_LIMITS, *ANY_BODY, *ANY_MODEL, *GENERATION)
_CONVERTED = (*ANY_ROUTE, *WITH_KEY, *WITH_LIMITS, *ANY_BODY, *ANY_MODEL)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "post",
        "/v1/chat/completions",
        "createChatCompletion",
        "Answer a conversation.",
        _GENERATED,
        request=ChatRequest,
        answer=ChatCompletion,
        event=ChatChunk,
        refused=CHAT_REFUSED,
    ),
    Operation(
        "post",
        "/v1/completions",
        "createCompletion",
        "Continue texts.",
        _GENERATED,
        request=CompletionRequest,
        answer=TextCompletion,
        event=TextCompletion,
        refused=COMPLETION_REFUSED,
    ),
    Operation(
        "post",
        "/v1/responses",
        "createResponse",
        "Answer a conversation of items. Nothing is stored.",
        _GENERATED,
        request=ResponseRequest,
        answer=Response,
        event=ResponseEvent,
        names_events=True,
        refused=RESPONSE_REFUSED,
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "createEmbedding",
        "Refused: the models here generate text.",
        (*_CONVERTED,),
        request=EmbeddingRequest,
    ),
    Operation(
        "post",
        "/tokenize",
        "tokenize",
        "Return the token ids of a text or of a conversation.",
        _CONVERTED,
        request=TokenizeRequest,
        answer=Tokenized,
        refused=TOKENIZE_REFUSED,
    ),
    Operation(
        "post",
        "/detokenize",
        "detokenize",
        "Return the text of token ids.",
        _CONVERTED,
        request=DetokenizeRequest,
        answer=Detokenized,
    ),
    Operation(
        "get",
        "/v1/models",
        "listModels",
        "List the models that the API key is good for.",
        (*ANY_ROUTE, *WITH_KEY, 503),
        answer=ModelList,
    ),
    Operation(
        "get",
        "/v1/models/{model}",
        "showModel",
        "Show one model.",
        (*ANY_ROUTE, *WITH_KEY, 403, *ANY_MODEL),
        answer=ModelEntry,
    ),
    Operation(
        "get",
        "/health/live",
        "isLive",
        "Whether this process can answer at all.",
        ANY_ROUTE,
        answer=Health,
        is_open="/health/live" in OPEN_ROUTES,
    ),
    Operation(
        "get",
        "/health/ready",
        "isReady",
        "Whether a request could be served now; proven by tokens that came back lately.",
        ANY_ROUTE,
        answer=Health,
        more={503: Health},
        is_open="/health/ready" in OPEN_ROUTES,
    ),
    Operation(
        "get",
        METRICS_ROUTE,
        "showMetrics",
        "Show the metrics of this process in the text format of Prometheus.",
        (*ANY_ROUTE, *WITH_KEY),
        text="text/plain",
        is_open=True,
    ),
    Operation("get", "/version", "showVersion", "Tell which Tandem this is.", (*ANY_ROUTE, *WITH_KEY), answer=Version),
    Operation(
        "get",
        "/openapi.json",
        "describe",
        "Describe all of this.",
        (*ANY_ROUTE, *WITH_KEY),
        answer=dict[str, Any],
    ),
)
