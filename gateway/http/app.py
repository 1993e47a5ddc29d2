"""The routes of the HTTP API."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.admission.arrivals import Arrivals
from gateway.admission.call import internal_error
from gateway.api.generate import Generator
from gateway.api.job_forwarder import JobForwarder
from gateway.http.anthropic import COUNT_TOKENS, MESSAGES
from gateway.http.api import api_of
from gateway.http.audio import TRANSCRIPTIONS, TRANSLATIONS
from gateway.http.batches import JobCalls
from gateway.http.call import ABORT, Behaviour, Endpoint
from gateway.http.inference import RESPONSES, ModelCalls
from gateway.http.models import ModelList
from gateway.identity.caller import ANY, ASKS, CHANGES
from gateway.telemetry.request_log import new_request_id
from sluice.openai.embeddings import EMBEDDINGS, RERANK
from sluice.openai.requests import URLS

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Application:
    """The HTTP API.

    Starlette's middleware and its search for a route take 40 us of a request. Endpoints need neither: they turn their
    errors into answers themselves.

    Attributes:
        fixed: endpoints by method and path, of paths without parameters.
        others: serves the other paths, and says of unknown ones that they are.
    """

    fixed: Mapping[tuple[str, str], ASGIApp]
    others: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        route = scope["method"], scope["path"]
        endpoint = self.fixed.get(route)
        if endpoint is None:
            await self.others(scope, receive, send)
            return
        try:
            await endpoint(scope, receive, send)
        except Exception as error:  # also in the code that turns errors into answers
            response = await _failed(Request(scope), error)
            try:
                await response(scope, receive, send)
            except RuntimeError:  # a part of the answer has been sent
                scope.get(ABORT, lambda: None)()


def make_app(
    generator: Generator,
    jobs: JobForwarder,
    arrivals: Arrivals,
    serving: Callable[[], bool],
    problem: Callable[[], str],
    *,
    hosts: frozenset[str] | None,
    ping_s: float,
) -> Application:
    """Make the application.

    Args:
        arrivals: what calls pass, over gRPC too.
        serving: whether the gateway can answer.
        problem: why a part of the mesh cannot be used while models answer; empty: all can.
        hosts: as in `Endpoint`.
        ping_s: the setting `http.stream_ping_s`.
    """
    admission = generator.admission
    max_bytes = generator.settings.max_message_bytes
    calls, batches = ModelCalls(generator, ping_s), JobCalls(jobs, arrivals)
    listed = ModelList(generator)

    async def health(request: Request) -> Response:
        if not serving():
            return JSONResponse({"status": "not ready"}, 503)
        # Load balancers read the code: models answer without JetStream.
        degraded = {"status": "degraded", "problem": problem()}
        return JSONResponse(degraded if problem() else {"status": "ok"})

    asking: dict[str, Behaviour] = {
        **dict.fromkeys(URLS, calls.complete),
        **dict.fromkeys((TRANSCRIPTIONS, TRANSLATIONS), calls.transcribe),
        **dict.fromkeys(RERANK, calls.rerank),
        EMBEDDINGS: calls.embed,
        RESPONSES: calls.respond,
        MESSAGES: calls.message,
        COUNT_TOKENS: calls.count_tokens,
    }
    table: list[tuple[str, str, Behaviour, frozenset[str]]] = [
        *(("POST", url, answer, ASKS) for url, answer in asking.items()),
        ("GET", "/v1/models", listed.models, ANY),
        ("GET", "/v1/models/{name:path}", listed.model, ANY),
        ("POST", "/v1/files", batches.upload, ASKS),
        ("GET", "/v1/files", batches.files, ANY),
        ("GET", "/v1/files/{id}", batches.file, ANY),
        ("DELETE", "/v1/files/{id}", batches.delete, CHANGES),
        ("GET", "/v1/files/{id}/content", batches.content, ANY),
        ("POST", "/v1/batches", batches.create, ASKS),
        ("GET", "/v1/batches", batches.batches, ANY),
        ("GET", "/v1/batches/{id}", batches.batch, ANY),
        ("POST", "/v1/batches/{id}/cancel", batches.cancel, CHANGES),
    ]
    routes, fixed = [Route("/health", health)], dict[tuple[str, str], ASGIApp]()
    for method, path, behaviour, roles in table:
        endpoint = Endpoint(
            arrivals,
            admission.limit_headers,
            max_bytes,
            hosts,
            behaviour,
            roles,
            path in asking,
        )
        routes.append(Route(path, endpoint, methods=[method]))
        if "{" not in path:
            fixed[method, path] = endpoint
    handlers = {HTTPException: _no_route, Exception: _failed}
    app = Starlette(routes=routes, exception_handlers=handlers)
    # Its redirects go to the host that the caller names, before that is checked.
    app.router.redirect_slashes = False
    return Application(fixed, app)


async def _no_route(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    api, request_id = api_of(request.url.path, request.headers), new_request_id()
    message = f"{request.method} {request.url.path} is not served"
    body = api.no_route(error.status_code, message, request_id)
    headers = dict.fromkeys(api.id_headers, request_id) | dict(error.headers or {})
    return JSONResponse(body, error.status_code, headers)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer a call that ended with a fault of the gateway, where no other code could."""
    request_id = new_request_id()
    _log.error(
        "HTTP call %s failed: %s %s", request_id, request.method, request.url.path, exc_info=error
    )
    api = api_of(request.url.path, request.headers)
    status, headers, body = api.error(internal_error(), api.named, request_id)
    return JSONResponse(body, status, dict.fromkeys(api.id_headers, request_id) | headers)
