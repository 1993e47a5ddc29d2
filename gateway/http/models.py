"""Serve /v1/models: the names that a request may use, "auto" first, in OpenAI's or Anthropic's form."""

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from gateway.api.generate import Generator
from gateway.http.api import VERSION
from gateway.http.batches import check_query, page_limit
from gateway.http.call import HttpCall
from sluice.defaults import AUTO
from sluice.errors import InvalidRequest, UnknownModel

Json = dict[str, Any]
PAGE: Final = "20"
PAGE_MAX: Final = 1000
"""Most models on a page of Anthropic's list."""


class ModelList:
    """The calls that list models."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._created = int(time.time())

    async def models(self, call: HttpCall) -> Json:
        """Serve /v1/models."""
        models = [self._model(name, call) for name in self._names]
        if VERSION not in call.metadata:
            return {"object": "list", "data": models}
        return page_of(models, call.query_params)

    async def model(self, call: HttpCall) -> Json:
        """Serve /v1/models/NAME."""
        name = call.path_params["name"]
        if name not in self._names:
            raise UnknownModel(f"no model {name[:64]!r}; there are {', '.join(self._names)}")
        return self._model(name, call)

    @property
    def _names(self) -> Sequence[str]:
        return AUTO, *self._generator.catalog.callable

    def _model(self, name: str, call: HttpCall) -> Json:
        is_anthropic = VERSION in call.metadata
        entry = {"id": name, "object": "model", "created": self._created, "owned_by": "sluice"}
        if is_anthropic:
            entry = self._anthropic(name)
        if name == AUTO:
            return entry
        model = self._generator.catalog[name]
        if not is_anthropic:
            entry["max_model_len"] = model.context_tokens
        overload = self._generator.upstream.overload
        ready = overload.is_ready(name, model.task_name, time.monotonic())
        return {**entry, "tier": model.settings.tier, "ready": ready}

    def _anthropic(self, name: str) -> Json:
        catalog = self._generator.catalog
        models = [catalog[model] for model in (catalog.callable if name == AUTO else [name])]
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": max((model.context_tokens for model in models), default=None),
            "max_tokens": max((model.max_answer_tokens for model in models), default=None),
        }


def page_of(models: Sequence[Json], query: Mapping[str, str]) -> Json:
    """Return a page of `models` as an object of Anthropic's API.

    Raises:
        InvalidRequest: A parameter is unsupported, or its value is invalid.
    """
    check_query(query, "limit", "after_id", "before_id", "beta")
    limit = page_limit(query.get("limit") or PAGE, PAGE_MAX)
    names = [model["id"] for model in models]
    positions = {}
    for field in ("after_id", "before_id"):
        if name := query.get(field):
            if name not in names:
                raise InvalidRequest.of(field, f"there is no model {name[:64]!r}")
            positions[field] = names.index(name)
    rest = models[positions.get("after_id", -1) + 1 : positions.get("before_id", len(models))]
    # Paging backwards ends at `before_id`, so the page is the end of the rest.
    is_backwards = "before_id" in positions and "after_id" not in positions
    page = rest[-limit:] if is_backwards else rest[:limit]
    first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {
        "data": list(page),
        "has_more": len(rest) > limit,
        "first_id": first_id,
        "last_id": last_id,
    }
