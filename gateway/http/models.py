"""/v1/models: what can be named in a request, "auto" first, as OpenAI's and Anthropic's API list it."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from gateway.api.generate import Generator
from gateway.http.anthropic import VERSION
from gateway.http.batches import page_limit
from gateway.http.call import HttpCall
from sluice.defaults import AUTO
from sluice.errors import InvalidRequest, UnknownModel

Json = dict[str, Any]
PAGE: Final = "20"
PAGE_MAX: Final = 1000
"""Models on a page of Anthropic's list."""


class ModelList:
    """Answer calls about the models."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._created = int(time.time())

    async def models(self, call: HttpCall) -> Json:
        """/v1/models."""
        models = [self._model(name, call) for name in self._names]
        if VERSION not in call.metadata:
            return {"object": "list", "data": models}
        return page_of(models, call.query_params)

    async def model(self, call: HttpCall) -> Json:
        """/v1/models/NAME."""
        name = call.path_params["name"]
        if name not in self._names:
            raise UnknownModel(f"no model {name[:64]!r}; there are {', '.join(self._names)}")
        return self._model(name, call)

    @property
    def _names(self) -> Sequence[str]:
        return AUTO, *self._generator.catalog.callable

    def _model(self, name: str, call: HttpCall) -> Json:
        facts = self._openai(name) if VERSION not in call.metadata else self._anthropic(name)
        if name == AUTO:
            return facts
        model = self._generator.catalog[name]
        overload = self._generator.upstream.overload
        ready = overload.is_ready(name, model.settings.task_name, time.monotonic())
        return {**facts, "tier": model.settings.tier, "ready": ready}

    def _openai(self, name: str) -> Json:
        named = {"id": name, "object": "model", "created": self._created, "owned_by": "sluice"}
        if name == AUTO:
            return named
        return {**named, "max_model_len": self._generator.catalog[name].context_tokens}

    def _anthropic(self, name: str) -> Json:
        known = self._generator.catalog.callable
        models = [self._generator.catalog[one] for one in (known if name == AUTO else [name])]
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": max((one.context_tokens for one in models), default=None),
            "max_tokens": max((one.max_answer_tokens for one in models), default=None),
        }


def page_of(models: Sequence[Json], query: Mapping[str, str]) -> Json:
    """Return a page of ``models`` as an object of Anthropic's API.

    Raises:
        InvalidRequest: the query is wrong.
    """
    if unknown := query.keys() - {"limit", "after_id", "before_id", "beta"}:
        raise InvalidRequest.of(min(unknown), "is not served")
    limit = page_limit(query.get("limit") or PAGE, PAGE_MAX)
    names = [model["id"] for model in models]
    places = {}
    for field in ("after_id", "before_id"):
        if name := query.get(field):
            if name not in names:
                raise InvalidRequest.of(field, f"there is no model {name[:64]!r}")
            places[field] = names.index(name)
    rest = models[places.get("after_id", -1) + 1 : places.get("before_id", len(models))]
    backwards = "before_id" in places and "after_id" not in places
    page = rest[-limit:] if backwards else rest[:limit]
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {
        "data": list(page),
        "has_more": len(rest) > limit,
        "first_id": ends[0],
        "last_id": ends[1],
    }
