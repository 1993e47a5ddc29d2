"""The requests that all gateways answer now: listed, counted, and cancelled by an operator."""

import time
from collections import defaultdict
from collections.abc import Iterable
from heapq import nlargest
from typing import Final

from gateway.shared.peers import Peers
from gateway.streaming.registry import Registry
from gateway.streaming.row_result import RowResult
from sluice.errors import Cancelled
from sluice.internal.v1.gateway_pb2 import GatewayAnswer, GatewayQuestion
from sluice.v1 import admin_pb2 as pb
from sluice.v1.inference_pb2 import Priority
from sluice.wire.clock import duration, ms_of
from sluice.wire.enums import value_of

LIST_MAX: Final = 1000
"""Requests in one answer: a message on NATS has 1 MiB."""
CANCELLED: Final = "an operator cancelled the request"


class RunningRequests:
    """Those of this gateway, and what the others say of theirs."""

    def __init__(self, registry: Registry, peers: Peers) -> None:
        self._registry = registry
        self._peers = peers
        peers.answer("running", self._answer_list)
        peers.answer("cancel", self._answer_cancel)

    async def listed(self, wanted: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        """Those that ``wanted`` names, of all gateways, the oldest first."""
        answers, silent = await self._ask(GatewayQuestion(running=wanted))
        found = [self._own(wanted), *(one.running for one in answers)]
        every = (request for one in found for request in one.requests)
        return pb.ListRequestsResponse(
            requests=nlargest(wanted.limit, every, key=lambda one: ms_of(one.age)),
            counts=[count for one in found for count in one.counts],
            gateways=[name for one in found for name in one.gateways],
            silent_gateways=silent,
        )

    async def cancel(self, wanted: pb.CancelRequestsRequest) -> pb.CancelRequestsResponse:
        """Cancels those that ``wanted`` names, at all gateways."""
        answers, silent = await self._ask(GatewayQuestion(cancel=wanted))
        others = [name for one in answers for name in one.cancelled.request_ids]
        names = [*self._cancel_own(wanted), *others]
        return pb.CancelRequestsResponse(request_ids=names, silent_gateways=silent)

    async def _ask(self, question: GatewayQuestion) -> tuple[list[GatewayAnswer], list[str]]:
        """The answers of the others, and who gave none; one of an earlier release does not know the question."""
        answers = await self._peers.ask_all(question)
        known = {name: one for name, one in answers.items() if one is not None and not one.problem}
        return [*known.values()], sorted(answers.keys() - known.keys())

    async def _answer_list(self, question: GatewayQuestion) -> GatewayAnswer:
        return GatewayAnswer(running=self._own(question.running))

    async def _answer_cancel(self, question: GatewayQuestion) -> GatewayAnswer:
        cancelled = pb.CancelRequestsResponse(request_ids=self._cancel_own(question.cancel))
        return GatewayAnswer(cancelled=cancelled)

    def _own(self, wanted: pb.ListRequestsRequest) -> pb.ListRequestsResponse:
        now, gateway = time.monotonic(), self._peers.gateway_id
        streams = [
            stream
            for stream in self._registry
            if wanted.tenant in ("", stream.request.tenant)
            and wanted.model in ("", stream.current.model)
        ]
        oldest = nlargest(wanted.limit, streams, key=lambda one: _age_s(one, now))
        return pb.ListRequestsResponse(
            requests=[_described(stream, gateway, now) for stream in oldest],
            counts=_counts(streams, now),
            gateways=[gateway],
        )

    def _cancel_own(self, wanted: pb.CancelRequestsRequest) -> list[str]:
        names = set(wanted.request_ids)
        streams = [
            stream
            for stream in self._registry
            if stream.request_id in names
            or (wanted.tenant and stream.request.tenant == wanted.tenant)
        ]
        for stream in streams:
            stream.fail(Cancelled(CANCELLED))
        return [stream.request_id for stream in streams]


def _age_s(stream: RowResult, now: float) -> float:
    return now - stream.request.arrived_at


def _described(stream: RowResult, gateway: str, now: float) -> pb.RunningRequest:
    current = stream.current
    return pb.RunningRequest(
        request_id=stream.request_id,
        tenant=stream.request.tenant,
        priority=value_of(Priority, stream.request.priority_class),
        model=current.model,
        state=value_of(pb.RequestState, stream.state.name),
        age=duration(_age_s(stream, now) * 1e3),
        remaining=duration(max(0.0, stream.request.deadline - now) * 1e3),
        prompt_tokens=current.prompt_tokens,
        completion_tokens=current.completion_tokens,
        gateway=gateway,
    )


def _counts(streams: Iterable[RowResult], now: float) -> list[pb.RunningCount]:
    groups: defaultdict[tuple[str, str, str], list[RowResult]] = defaultdict(list)
    for stream in streams:
        request = stream.request
        groups[request.tenant, stream.current.model, request.priority_class].append(stream)
    return [
        pb.RunningCount(
            tenant=tenant,
            model=model,
            priority=value_of(Priority, priority_class),
            requests=len(group),
            waiting=sum(not one.current.completion_tokens for one in group),
            completion_tokens=sum(one.current.completion_tokens for one in group),
            oldest_age=duration(max(_age_s(one, now) for one in group) * 1e3),
        )
        for (tenant, model, priority_class), group in groups.items()
    ]
