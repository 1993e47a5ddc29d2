"""The routes of the HTTP API."""

from collections.abc import Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.admission.calls import CallChecks
from gateway.admission.overload import ModelLoadTable
from gateway.api.generate import Generator
from gateway.api.job_forwarder import JobForwarder
from gateway.http.audio import TRANSCRIPTIONS, TRANSLATIONS
from gateway.http.batches import JobCalls
from gateway.http.call import Behaviour, Endpoint
from gateway.http.inference import RESPONSES, ModelCalls
from gateway.http.requests import class_of
from gateway.identity.caller import ANY, ASKS, CHANGES
from gateway.telemetry.request_log import new_request_id
from gateway.validation.requests import UNSTATED_CLASS
from sluice.openai.embeddings import EMBEDDINGS, RERANK
from sluice.openai.errors import error_body
from sluice.openai.requests import URLS


def make_app(
    generator: Generator,
    loads: ModelLoadTable,
    jobs: JobForwarder,
    checks: CallChecks,
    serving: Callable[[], bool],
    *,
    local_only: bool,
) -> Starlette:
    """The application.

    Args:
        checks: what calls pass, over gRPC too.
        serving: whether the gateway can answer.
        local_only: as in `Endpoint`.
    """
    limit_headers = generator.upstream.admission.limit_headers
    max_bytes = generator.settings.max_message_bytes

    def route(
        method: str,
        path: str,
        behaviour: Behaviour,
        roles: frozenset[str] = ANY,
        class_of: Callable[[Mapping[str, str]], str] = lambda _: UNSTATED_CLASS,
    ) -> Route:
        endpoint = Endpoint(
            checks, limit_headers, max_bytes, local_only, behaviour, roles, class_of
        )
        return Route(path, endpoint, methods=[method])

    async def health(request: Request) -> Response:
        ready = serving()
        return JSONResponse({"status": "ok" if ready else "not ready"}, 200 if ready else 503)

    calls, batches = ModelCalls(generator, loads), JobCalls(jobs)
    asking: dict[str, Behaviour] = {
        **dict.fromkeys(URLS, calls.complete),
        **dict.fromkeys((TRANSCRIPTIONS, TRANSLATIONS), calls.transcribe),
        **dict.fromkeys(RERANK, calls.rerank),
        EMBEDDINGS: calls.embed,
        RESPONSES: calls.respond,
    }
    return Starlette(
        routes=[
            *(route("POST", url, answer, ASKS, class_of) for url, answer in asking.items()),
            route("GET", "/v1/models", calls.models),
            route("GET", "/v1/models/{name:path}", calls.model),
            route("POST", "/v1/files", batches.upload, ASKS),
            route("GET", "/v1/files", batches.files),
            route("GET", "/v1/files/{id}", batches.file),
            route("DELETE", "/v1/files/{id}", batches.delete, CHANGES),
            route("GET", "/v1/files/{id}/content", batches.content),
            route("POST", "/v1/batches", batches.create, ASKS),
            route("GET", "/v1/batches", batches.batches),
            route("GET", "/v1/batches/{id}", batches.batch),
            route("POST", "/v1/batches/{id}/cancel", batches.cancel, CHANGES),
            Route("/health", health),
        ],
        exception_handlers={HTTPException: _no_route},
    )


async def _no_route(request: Request, error: Exception) -> Response:
    """No such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path} is not served"
    body = error_body(error.status_code, "unknown_url", message)
    headers = {"x-request-id": new_request_id(), **(error.headers or {})}
    return JSONResponse(body, error.status_code, headers)
