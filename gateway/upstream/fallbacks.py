"""Fallbacks for one answer: a smaller model answers when the one that was asked fails before its first token.

A model that is known to be down or late is left out when the request is routed (`gateway.admission.overload`). This is
for the failure that the request itself meets. Fallbacks are used in the order of the configuration, each once.
"""

import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Final

from gateway.admission.request_context import RequestContext
from gateway.streaming.answer_stream import AnswerStream
from gateway.streaming.model_run import ModelRun
from gateway.upstream.runs import Upstream, spawn_beside
from sluice.errors import EngineFailed, ModelUnavailable, Overloaded, SluiceError
from sluice.v1.inference_pb2 import ROUTE_STRATEGY_SAFETY

logger = logging.getLogger(__name__)

FAILURES: Final = (EngineFailed, ModelUnavailable, Overloaded)
"""Errors of a run that another model may not meet; a request that is wrong stays wrong."""


def fall_back(
    upstream: Upstream, context: RequestContext, stream: AnswerStream, error: SluiceError
) -> bool:
    """Start to look for a fallback of the current run, which failed with `error`.

    Returns False when none may or can answer; the stream ends with `error` then.
    """
    run = stream.current
    is_governed = context.plan.route.strategy == ROUTE_STRATEGY_SAFETY
    if not context.allow_degraded or is_governed or not isinstance(error, FAILURES):
        return False
    if next(_candidates(upstream, context, stream), None) is None:
        return False
    # At once, and not with the end of the answer: others should not meet the failure meanwhile.
    upstream.usage.record_result(context, run, error, time.monotonic())
    run.error = error
    spawn_beside(stream, partial(_replace, upstream, context, stream, run, error))
    return True


def _candidates(upstream: Upstream, context: RequestContext, stream: AnswerStream) -> Iterator[str]:
    """Yield the fallbacks of the current model that have not failed, and could answer in time."""
    failed = {run.model for run in stream.runs}
    for model in context.rules.fallbacks.get(stream.current.model, ()):
        outlook = upstream.overload.outlook(model, context, time.monotonic())
        if model not in failed and outlook.problem is None:
            yield model


async def _replace(
    upstream: Upstream,
    context: RequestContext,
    stream: AnswerStream,
    failed: ModelRun,
    error: SluiceError,
) -> None:
    """Send a run of the first fallback that has room for the prompt; raise `error` if none has."""
    seed = context.first.sampling.seed
    for model in _candidates(upstream, context, stream):
        prepared = await upstream.preparation.prepare_fallback(context, model)
        if prepared is not None:
            break
    else:
        raise error
    prepared.sampling.seed = seed
    run_id = f"{context.request_id}-{len(stream.runs) + 1}"
    run = upstream.new_run(context.request, prepared, run_id, context.deadline)
    if not stream.replace_failed(failed, run, error.message):
        return
    _degrade(context, failed, run, error)
    context.first, context.prompts, context.second = prepared, (prepared,), None
    upstream.send(context, run, prepared)


def _degrade(context: RequestContext, failed: ModelRun, run: ModelRun, error: SluiceError) -> None:
    """Change the plan of a request whose model was replaced by a fallback."""
    plan, reason = context.plan, f"{failed.model} failed before its first token: {error.message}"
    reason = f"degraded: {reason}"
    plan.move(run.model, run.settings.tier, reason)
    plan.route.reason = f"{plan.route.reason}; {reason}"
    plan.route.degraded, plan.cascade = True, None
    logger.info(
        "replaced %s by its fallback %s: %s (request %s)",
        failed.model,
        run.model,
        error.message,
        context.request_id,
    )
