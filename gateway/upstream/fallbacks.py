"""Fallbacks for one answer: a smaller model answers when the one that was asked fails before its first token.

A model that is known to be down or late is left out when the request is routed (`gateway.admission.overload`). This is
for the failure that the request itself meets.
"""

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Final

from gateway.admission.prompts import PreparedPrompt
from gateway.admission.request_context import RequestContext
from gateway.streaming.answer import Answer
from gateway.streaming.row import Row
from gateway.upstream.rows import Beside, Upstream
from sluice.errors import EngineFailed, ModelUnavailable, Overloaded, SluiceError
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_SAFETY

logger = logging.getLogger(__name__)

FAILURES: Final = (EngineFailed, ModelUnavailable, Overloaded)
"""Errors of a row that another model may not meet; a request that is wrong stays wrong."""


class Fallbacks:
    """The fallbacks of one request. They are used in the order of the configuration, each once."""

    def __init__(self, upstream: Upstream, context: RequestContext) -> None:
        self._upstream = upstream
        self._context = context
        self._beside = Beside()
        self._seed = context.first.sampling.seed

    def begin(self, answer: Answer, error: SluiceError) -> bool:
        """Let a fallback answer in place of the current row, which failed with ``error``.

        Returns False when none may or can; the answer ends with ``error`` then.
        """
        context, row = self._context, answer.current
        is_governed = context.plan.route.strategy == ROUTE_STRATEGY_SAFETY
        if not context.scheduling.allow_degraded or is_governed or not isinstance(error, FAILURES):
            return False
        if next(self._candidates(answer), None) is None:
            return False
        # At once, and not with the end of the answer: others should not meet the failure meanwhile.
        now = time.monotonic()
        self._upstream.usage.record_result(context.scheduling, row, error, now)
        row.error = error
        self._beside.spawn(answer, partial(self._replace, answer, row, error))
        return True

    def close(self) -> None:
        """Stop looking for a fallback: the answer has ended."""
        self._beside.close()

    def _candidates(self, answer: Answer) -> Iterator[str]:
        """Yield the fallbacks of the current model that have not failed, and could answer in time."""
        failed = {one.model for one in answer.attempts}
        overload, scheduling = self._upstream.overload, self._context.scheduling
        for model in scheduling.rules.fallbacks.get(answer.current.model, ()):
            outlook = overload.outlook(model, scheduling, time.monotonic())
            if model not in failed and outlook.problem is None:
                yield model

    async def _replace(self, answer: Answer, row: Row, error: SluiceError) -> None:
        for model in self._candidates(answer):
            prepared = await self._upstream.preparation.prepare_fallback(self._context, model)
            if prepared is not None:
                self._send(answer, row, prepared, error)
                return
        raise error

    def _send(
        self, answer: Answer, failed: Row, prepared: PreparedPrompt, error: SluiceError
    ) -> None:
        context, upstream, model = self._context, self._upstream, prepared.model
        prepared.sampling.seed = self._seed
        row_id = f"{context.request_id}-{len(answer.attempts) + 1}"
        row = upstream.new_row(context.request, prepared, row_id)
        if not answer.fall_back(failed, row, error.message):
            return
        reason = f"degraded: {failed.model} failed before its first token: {error.message}"
        plan = context.plan
        plan.move(model.name, model.settings.tier, reason)
        plan.route.reason = f"{plan.route.reason}; {reason}"
        plan.route.degraded, plan.cascade = True, None
        context.prompts, context.second = (prepared,), None
        logger.info(
            "replaced %s by its fallback %s: %s (request %s)",
            *(failed.model, model.name, error.message, context.request_id),
        )
        upstream.send(context, row, prepared)
