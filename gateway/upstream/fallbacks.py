"""Fallbacks for one answer: a smaller model answers when the one that was asked fails before its first token.

A model that is known to be down or late is left out when the request is routed (`gateway.admission.overload`). This is
for the failure that the request itself meets.
"""

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Final

from gateway.admission.request_context import PreparedPrompt, RequestContext
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.model_run import ModelRun
from gateway.upstream.runs import SideTasks, Upstream
from sluice.errors import EngineFailed, ModelUnavailable, Overloaded, SluiceError
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_SAFETY

logger = logging.getLogger(__name__)

FAILURES: Final = (EngineFailed, ModelUnavailable, Overloaded)
"""Errors of a row that another model may not meet; a request that is wrong stays wrong."""


class Fallbacks(SideTasks):
    """The fallbacks of one request. They are used in the order of the configuration, each once."""

    def __init__(self, upstream: Upstream, context: RequestContext) -> None:
        super().__init__()
        self._upstream = upstream
        self._context = context
        self._seed = context.first.sampling.seed

    def begin(self, stream: AnswerStream, error: SluiceError) -> bool:
        """Start to look for a fallback of the current run, which failed with `error`.

        Returns False when none may or can answer; the stream ends with `error` then.
        """
        context, run = self._context, stream.current
        is_governed = context.plan.route.strategy == ROUTE_STRATEGY_SAFETY
        if not context.allow_degraded or is_governed or not isinstance(error, FAILURES):
            return False
        if next(self._candidates(stream), None) is None:
            return False
        # At once, and not with the end of the answer: others should not meet the failure meanwhile.
        self._upstream.usage.record_result(context, run, error, time.monotonic())
        run.error = error
        self.spawn(stream, partial(self._replace, stream, run, error))
        return True

    def _candidates(self, stream: AnswerStream) -> Iterator[str]:
        """Yield the fallbacks of the current model that have not failed, and could answer in time."""
        failed = {run.model for run in stream.runs}
        overload, context = self._upstream.overload, self._context
        for model in context.rules.fallbacks.get(stream.current.model, ()):
            outlook = overload.outlook(model, context, time.monotonic())
            if model not in failed and outlook.problem is None:
                yield model

    async def _replace(self, stream: AnswerStream, failed: ModelRun, error: SluiceError) -> None:
        for model in self._candidates(stream):
            prepared = await self._upstream.preparation.prepare_fallback(self._context, model)
            if prepared is not None:
                self._send(stream, failed, prepared, error)
                return
        raise error

    def _send(
        self, stream: AnswerStream, failed: ModelRun, prepared: PreparedPrompt, error: SluiceError
    ) -> None:
        context, upstream, model = self._context, self._upstream, prepared.model
        prepared.sampling.seed = self._seed
        run_id = f"{context.request_id}-{len(stream.runs) + 1}"
        run = upstream.new_run(context.request, prepared, run_id, context.deadline)
        if not stream.replace_failed(failed, run, error.message):
            return
        reason = f"degraded: {failed.model} failed before its first token: {error.message}"
        plan = context.plan
        plan.move(model.name, model.settings.tier, reason)
        plan.route.reason = f"{plan.route.reason}; {reason}"
        plan.route.degraded, plan.cascade = True, None
        context.prompts, context.second = (prepared,), None
        logger.info(
            "replaced %s by its fallback %s: %s (request %s)",
            failed.model,
            model.name,
            error.message,
            context.request_id,
        )
        upstream.send(context, run, prepared)
