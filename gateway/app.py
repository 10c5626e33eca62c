"""The gateway's HTTP application: which path leads to which handler, and what they share."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from common.telemetry.metrics import GatewayMetrics
from gateway.admission import Admission
from gateway.api.authenticating import authenticate
from gateway.api.chat import create_chat_completion
from gateway.api.completions import create_completion
from gateway.api.draining import give_up_connection, use_connection
from gateway.api.embeddings import refuse_embeddings
from gateway.api.errors import answer_errors
from gateway.api.health import live, ready
from gateway.api.keys import SERVICE, VLLM_ALIASES
from gateway.api.metrics import show_metrics
from gateway.api.models import list_models, show_model
from gateway.api.observing import echo_request_id, observe
from gateway.api.openapi import describe
from gateway.api.rate_headers import tell_quota
from gateway.api.responses import create_response
from gateway.api.tokens import detokenize, tokenize
from gateway.api.version import show_version
from gateway.engine import Engine
from gateway.entrance import Entrance
from gateway.guidance.grammars import Grammars
from gateway.served_models import ServedModels
from gateway.service import Service
from gateway.settings import GatewaySettings
from gateway.under_way import UnderWay
from gateway.vllm_aliases import VllmAliases


def create_app(
    engine: Engine,
    settings: GatewaySettings,
    metrics: GatewayMetrics,
    entrance: Entrance,
    under_way: UnderWay | None = None,
) -> web.Application:
    """Return the application that serves `engine`'s models to those whom `entrance` lets in; `under_way` can end what
    it serves.
    """
    around = (use_connection, observe, answer_errors, authenticate)
    app = web.Application(middlewares=around, client_max_size=settings.max_body_bytes)
    service = app[SERVICE] = _service(engine, settings, metrics, entrance, under_way or UnderWay())
    if settings.vllm_metrics:
        app[VLLM_ALIASES] = VllmAliases(service.metrics, service.models)
    app.on_response_prepare.append(echo_request_id)
    app.on_response_prepare.append(give_up_connection)
    app.on_response_prepare.append(tell_quota)
    app.cleanup_ctx.append(_threads)
    app.router.add_post("/v1/chat/completions", create_chat_completion)
    app.router.add_post("/v1/completions", create_completion)
    app.router.add_post("/v1/responses", create_response)
    app.router.add_post("/v1/embeddings", refuse_embeddings)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/v1/models/{model:.+}", show_model)
    app.router.add_get("/health/live", live)
    app.router.add_get("/health/ready", ready)
    app.router.add_get("/metrics", show_metrics)
    app.router.add_get("/version", show_version)
    app.router.add_get("/openapi.json", describe)
    return app


def _service(
    engine: Engine, settings: GatewaySettings, metrics: GatewayMetrics, entrance: Entrance, under_way: UnderWay
) -> Service:
    executor = ThreadPoolExecutor(settings.num_tokenizer_threads, thread_name_prefix="tokenize")
    grammars = Grammars(settings.num_grammar_compilers, settings.grammar_timeout_s)
    return Service(
        engine=engine,
        models=ServedModels(engine, executor, settings.render_timeout_s, grammars),
        admission=Admission(settings.max_concurrent_requests, entrance.tenants),
        metrics=metrics,
        settings=settings,
        executor=executor,
        entrance=entrance,
        under_way=under_way,
    )


async def _threads(app: web.Application) -> AsyncIterator[None]:
    yield
    await app[SERVICE].models.grammars.close()
    app[SERVICE].close()
