"""The HTTP app: which path does what. Handlers take the raw request, because bodies are read and checked strictly."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from qengine import __version__
from qengine.server import chat, completions, tokens
from qengine.server.auth import ApiKeyGuard, api_keys
from qengine.server.errors import ApiError, api_error
from qengine.server.metrics import CONTENT_TYPE
from qengine.server.responses import HealthReport, ModelCard, ModelList, json_response
from qengine.server.state import ServerState

Handler = Callable[[ServerState, Request], Awaitable[Response]]


async def health(state: ServerState, request: Request) -> Response:
    """200 while the engine's loop beats and progresses, else 503 with the reason."""
    found = state.client.health(state.config.health_timeout)
    stats = state.client.stats
    report = HealthReport(
        status="ok" if found.reason is None else "unhealthy",
        reason=found.reason,
        heartbeat_age_s=round(found.heartbeat_age_s, 3),
        progress_age_s=round(found.progress_age_s, 3),
        num_requests_running=stats.num_running,
        num_requests_waiting=stats.num_waiting,
    )
    return json_response(report, 200 if found.reason is None else 503)


async def version(state: ServerState, request: Request) -> Response:
    return json_response({"version": __version__})


async def metrics(state: ServerState, request: Request) -> Response:
    return Response(state.metrics.expose(), headers={"Content-Type": CONTENT_TYPE})


def _card(state: ServerState, name: str) -> ModelCard:
    facts = state.client.facts
    return ModelCard(id=name, created=state.created, root=facts.model_folder, max_model_len=facts.max_model_len)


async def models(state: ServerState, request: Request) -> Response:
    return json_response(ModelList(data=[_card(state, name) for name in state.names]))


async def model(state: ServerState, request: Request) -> Response:
    name = request.path_params["name"]
    state.check_model(name)
    return json_response(_card(state, name))


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/health", health),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name:path}", model),
    ("POST", "/v1/completions", completions.create),
    ("POST", "/v1/chat/completions", chat.create),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
)


def _endpoint(state: ServerState, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """A handler as an endpoint; every exception becomes an answer in OpenAI form."""

    @functools.wraps(handler)
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(state, request)
        except Exception as e:
            return api_error(e).response()

    endpoint.__dict__.pop("__wrapped__")  # the framework must see this signature, not the handler's
    return endpoint


async def _http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return ApiError(error.status_code, text, headers=dict(error.headers or {})).response()


def create_app(state: ServerState) -> FastAPI:
    app = FastAPI(title="qengine", version=__version__, openapi_url=None)
    for method, path, handler in ROUTES:
        app.add_route(path, _endpoint(state, handler), methods=[method])
    app.add_exception_handler(HTTPException, _http_error)
    if keys := api_keys(state.config.api_key):
        app.add_middleware(ApiKeyGuard, keys=keys)
    return app
