"""The routes of the HTTP API."""

import time
from collections.abc import Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.admission.arriving import Arriving
from gateway.admission.load_table import ModelLoadTable
from gateway.api.generate import Generator, new_request_id
from gateway.api.job_forwarder import JobForwarder
from gateway.api.texts import TextCalls
from gateway.http.audio import TRANSCRIPTIONS, TRANSLATIONS, Audio
from gateway.http.batches import Batches, Files
from gateway.http.call import Behaviour, CallChecks, Endpoint
from gateway.http.completions import Completions
from gateway.http.headers import class_of
from gateway.http.models import Models
from gateway.http.responses import RESPONSES, Responses
from gateway.http.texts import Texts
from gateway.identity.authenticator import Authenticator
from gateway.identity.caller import ANY, ASKS, CHANGES
from gateway.validation.requests import UNSTATED_CLASS
from sluice.openai.embeddings import EMBEDDINGS, RERANK
from sluice.openai.errors import error_body
from sluice.openai.requests import URLS


def make_app(
    generator: Generator,
    loads: ModelLoadTable,
    jobs: JobForwarder,
    authenticator: Authenticator,
    arriving: Arriving,
    serving: Callable[[], bool],
    *,
    local_only: bool,
) -> Starlette:
    """The application.

    Args:
        arriving: what all ways in share.
        serving: whether the gateway can answer.
        local_only: see `CallChecks`.
    """
    catalog = generator.upstream.admission.catalog
    checks = CallChecks(
        authenticator,
        generator.limiter,
        arriving,
        generator.upstream.usage.limits,
        generator.settings.max_message_bytes,
        local_only,
    )

    def route(
        method: str,
        path: str,
        behaviour: Behaviour,
        roles: frozenset[str] = ANY,
        class_of: Callable[[Mapping[str, str]], str] = lambda _: UNSTATED_CLASS,
    ) -> Route:
        return Route(path, Endpoint(checks, behaviour, roles, class_of), methods=[method])

    async def health(request: Request) -> Response:
        ready = serving()
        return JSONResponse({"status": "ok" if ready else "not ready"}, 200 if ready else 503)

    texts = Texts(TextCalls(generator))
    asking: dict[str, Behaviour] = {
        **{url: Completions(generator, catalog, url) for url in URLS},
        **{url: Audio(generator, catalog, url) for url in (TRANSCRIPTIONS, TRANSLATIONS)},
        **dict.fromkeys(RERANK, texts.rerank),
        EMBEDDINGS: texts.embed,
        RESPONSES: Responses(generator),
    }
    models = Models(catalog, loads, int(time.time()), time.monotonic)
    files, batches = Files(jobs), Batches(jobs)
    return Starlette(
        routes=[
            *(route("POST", url, answer, ASKS, class_of) for url, answer in asking.items()),
            route("GET", "/v1/models", models.list),
            route("GET", "/v1/models/{name:path}", models.get),
            route("POST", "/v1/files", files.upload, ASKS),
            route("GET", "/v1/files", files.page),
            route("GET", "/v1/files/{id}", files.get),
            route("DELETE", "/v1/files/{id}", files.delete, CHANGES),
            route("GET", "/v1/files/{id}/content", files.content),
            route("POST", "/v1/batches", batches.create, ASKS),
            route("GET", "/v1/batches", batches.page),
            route("GET", "/v1/batches/{id}", batches.get),
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
