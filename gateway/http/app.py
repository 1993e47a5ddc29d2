"""The routes of the HTTP API."""

import logging
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.admission.calls import CallChecks, gateway_failed
from gateway.api.generate import Generator
from gateway.api.job_forwarder import JobForwarder
from gateway.http.answers import error_answer
from gateway.http.audio import TRANSCRIPTIONS, TRANSLATIONS
from gateway.http.batches import JobCalls
from gateway.http.call import Behaviour, Endpoint
from gateway.http.inference import RESPONSES, ModelCalls
from gateway.identity.caller import ANY, ASKS, CHANGES
from gateway.telemetry.request_log import new_request_id
from sluice.openai.embeddings import EMBEDDINGS, RERANK
from sluice.openai.errors import error_body
from sluice.openai.requests import URLS

_log = logging.getLogger(__name__)


def make_app(
    generator: Generator,
    jobs: JobForwarder,
    checks: CallChecks,
    serving: Callable[[], bool],
    problem: Callable[[], str],
    *,
    hosts: frozenset[str] | None,
    ping_s: float,
) -> Starlette:
    """The application.

    Args:
        checks: what calls pass, over gRPC too.
        serving: whether the gateway can answer.
        problem: why a part of the mesh cannot be used while models answer; empty: all can.
        hosts: as in `Endpoint`.
        ping_s: the setting `http.stream_ping_s`.
    """
    admission = generator.upstream.admission
    max_bytes = generator.settings.max_message_bytes
    calls, batches = ModelCalls(generator, ping_s), JobCalls(jobs, checks.arriving)

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
    }
    table: list[tuple[str, str, Behaviour, frozenset[str]]] = [
        *(("POST", url, answer, ASKS) for url, answer in asking.items()),
        ("GET", "/v1/models", calls.models, ANY),
        ("GET", "/v1/models/{name:path}", calls.model, ANY),
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
    routes = [Route("/health", health)]
    for method, path, behaviour, roles in table:
        endpoint = Endpoint(
            checks,
            admission.limit_headers,
            max_bytes,
            hosts,
            behaviour,
            roles,
            path in asking,
            admission.count_refused,
        )
        routes.append(Route(path, endpoint, methods=[method]))
    handlers = {HTTPException: _no_route, Exception: _failed}
    app = Starlette(routes=routes, exception_handlers=handlers)
    # Its redirects go to the host that the caller names, before that is checked.
    app.router.redirect_slashes = False
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not served"
    body = error_body(error.status_code, "unknown_url", message)
    headers = {"x-request-id": new_request_id(), **(error.headers or {})}
    return JSONResponse(body, error.status_code, headers)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer a call that ended with a fault of the gateway, where no other code could."""
    request_id = new_request_id()
    _log.error(
        "HTTP call %s failed: %s %s", request_id, request.method, request.url.path, exc_info=error
    )
    status, headers, body = error_answer(gateway_failed())
    return JSONResponse(body, status, {"x-request-id": request_id, **headers})
