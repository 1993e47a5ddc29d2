"""Fallbacks for one answer: a smaller model answers when the one that was asked fails before its first token.

A model that is known to be down or late is left out when the request is routed (`gateway.admission.overload`). This is
for the failure that the request itself meets. Fallbacks are used in the order of the configuration, each once.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from gateway.admission.prompts import ContextFit
from gateway.admission.request_context import RequestContext
from gateway.streaming.answer_stream import AnswerStream
from gateway.upstream.runs import Upstream, spawn_beside
from sluice.errors import EngineFailed, InvalidRequest, ModelUnavailable, Overloaded, SluiceError
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
    now, failed = time.monotonic(), {run.model for run in stream.runs}
    candidates = [
        model
        for model in context.rules.fallbacks.get(run.model, ())
        if model not in failed and upstream.overload.outlook(model, context, now).problem is None
    ]
    if not candidates:
        return False
    # At once, and not with the end of the answer: others should not meet the failure meanwhile.
    upstream.overload.record_result(context, run, error, now)
    run.error = error
    spawn_beside(stream, partial(_replace, upstream, context, stream, candidates, error))
    return True


async def _replace(
    upstream: Upstream,
    context: RequestContext,
    stream: AnswerStream,
    candidates: Sequence[str],
    error: SluiceError,
) -> None:
    """Send a run of the first candidate that has room for the prompt; raise `error` if none has."""
    failed, seed = stream.current, context.first.sampling.seed
    for model in candidates:
        with suppress(InvalidRequest):  # such as tools that its chat template does not know
            contexts = ContextFit(context)
            prepared = await upstream.preparation.prepare_for(context, model, contexts)
            if prepared is not None:
                break
    else:
        raise error
    prepared.sampling.seed = seed
    run_id = f"{context.request_id}-{len(stream.runs) + 1}"
    run = upstream.new_run(context.request, prepared, run_id, context.deadline)
    if not stream.replace_failed(failed, run, error.message):
        return
    cause = f"{failed.model} failed before its first token: {error.message}"
    context.plan.degrade(run.model, run.settings.tier, cause)
    logger.info("request %s fell back to %s: %s", context.request_id, run.model, cause)
    context.first, context.prompts, context.second = prepared, (prepared,), None
    upstream.send(context, run, prepared)
