"""The routes of the HTTP API, and the application that serves them."""

import logging
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.admission.arrivals import Arrivals
from gateway.admission.request_context import internal_error
from gateway.api.generate import Generator
from gateway.api.job_forwarder import JobForwarder
from gateway.http.api import COUNT_TOKENS, MESSAGES, api_of
from gateway.http.audio import TRANSCRIPTIONS, TRANSLATIONS
from gateway.http.batches import JobCalls
from gateway.http.call import Behaviour, Endpoint
from gateway.http.inference import RESPONSES, ModelCalls
from gateway.http.models import ModelList
from gateway.identity.caller import ANY, CALLERS, CHANGES
from gateway.telemetry.request_log import new_request_id
from sluice.openai.embeddings import EMBEDDINGS, RERANK
from sluice.openai.requests import CHAT, COMPLETIONS

logger = logging.getLogger(__name__)


def make_app(
    generator: Generator,
    jobs: JobForwarder,
    arrivals: Arrivals,
    serving: Callable[[], bool],
    problem: Callable[[], str],
    *,
    hosts: frozenset[str] | None,
    ping_s: float,
) -> Starlette:
    """Return the HTTP application.

    Args:
        generator: Answers requests to models.
        jobs: Forwards calls about files and batches to `jobs`.
        arrivals: Checks that calls pass, shared with gRPC.
        serving: Returns whether the gateway can answer.
        problem: Returns why a part of the mesh is unavailable while models answer; empty if nothing is.
        hosts: Served host names, see `Endpoint`.
        ping_s: `HttpSettings.stream_ping_s`.
    """
    admission = generator.admission
    max_bytes = generator.settings.max_message_bytes
    calls, batches = ModelCalls(generator, ping_s), JobCalls(jobs, arrivals)
    models = ModelList(generator)

    async def health(request: Request) -> Response:
        if not serving():
            return JSONResponse({"status": "not ready"}, 503)
        # Models answer without JetStream, so the status, which load balancers read, stays 200.
        degraded = {"status": "degraded", "problem": problem()}
        return JSONResponse(degraded if problem() else {"status": "ok"})

    model_calls: dict[str, Behaviour] = {
        CHAT: calls.chat,
        COMPLETIONS: calls.complete,
        **dict.fromkeys((TRANSCRIPTIONS, TRANSLATIONS), calls.transcribe),
        **dict.fromkeys(RERANK, calls.rerank),
        EMBEDDINGS: calls.embed,
        RESPONSES: calls.respond,
        MESSAGES: calls.message,
        COUNT_TOKENS: calls.count_tokens,
    }
    table: list[tuple[str, str, Behaviour, frozenset[str]]] = [
        *(("POST", url, answer, CALLERS) for url, answer in model_calls.items()),
        ("GET", "/v1/models", models.models, ANY),
        ("GET", "/v1/models/{name:path}", models.model, ANY),
        ("POST", "/v1/files", batches.upload, CALLERS),
        ("GET", "/v1/files", batches.files, ANY),
        ("GET", "/v1/files/{id}", batches.file, ANY),
        ("DELETE", "/v1/files/{id}", batches.delete, CHANGES),
        ("GET", "/v1/files/{id}/content", batches.content, ANY),
        ("POST", "/v1/batches", batches.create, CALLERS),
        ("GET", "/v1/batches", batches.batches, ANY),
        ("GET", "/v1/batches/{id}", batches.batch, ANY),
        ("POST", "/v1/batches/{id}/cancel", batches.cancel, CHANGES),
    ]
    routes = list[Route]()
    for method, path, behaviour, roles in table:
        endpoint = Endpoint(
            arrivals,
            admission.limits.headers,
            max_bytes,
            hosts,
            behaviour,
            roles,
            path in model_calls,
        )
        routes.append(Route(path, endpoint, methods=[method]))
    handlers = {HTTPException: _answer_no_route, Exception: _answer_fault}
    app = Starlette(routes=[*routes, Route("/health", health)], exception_handlers=handlers)
    # Its redirects would go to the host that the caller names, before `Endpoint` checks it.
    app.router.redirect_slashes = False
    return app


async def _answer_no_route(request: Request, error: Exception) -> Response:
    """Answer a call to an unknown path, or with a method that the path does not have."""
    assert isinstance(error, HTTPException)
    api, request_id = api_of(request.url.path, request.headers), new_request_id()
    message = f"{request.method} {request.url.path} is not served"
    body = api.no_route(error.status_code, message, request_id)
    headers = dict.fromkeys(api.id_headers, request_id) | dict(error.headers or {})
    return JSONResponse(body, error.status_code, headers)


async def _answer_fault(request: Request, error: Exception) -> Response:
    """Answer a call that failed outside of the code that turns errors into answers."""
    request_id = new_request_id()
    logger.error(
        "HTTP call %s failed: %s %s", request_id, request.method, request.url.path, exc_info=error
    )
    api = api_of(request.url.path, request.headers)
    status, headers, body = api.error(internal_error(), api.named, request_id)
    return JSONResponse(body, status, dict.fromkeys(api.id_headers, request_id) | headers)
