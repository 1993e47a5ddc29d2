"""Serves `sluice.v1.SafetyService`: what the safety policies make of one text."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.admission.admission import Admission
from gateway.admission.request_context import RequestContext
from gateway.api.count import CHECK, guards_timeout_s
from gateway.api.methods import GrpcCall
from gateway.safety.findings import Action, TakenAction
from gateway.safety.inspector import RequestInspection
from gateway.shared.peers import Peers
from gateway.telemetry.request_log import untraced
from gateway.validation.conversation import USER, Conversation, FieldViolations, Turn
from gateway.validation.requests import ValidRequest, check_labels
from sluice.errors import NoDryRun
from sluice.internal.v1.gateway_pb2 import DryRunQuery, GatewayQuery, GatewayReply
from sluice.v1 import safety_pb2 as pb
from sluice.wire.enums import value_of

ASIDE_FINDINGS: Final = 256
"""Most findings of a response that is made in the event loop, not in a thread: a text may have ten thousand."""
SAFETY_SERVICE: Final = pb.DESCRIPTOR.services_by_name["SafetyService"].full_name


@dataclass(frozen=True, eq=False)
class SafetyService:
    """Answers from the policies in force.

    Attributes:
        admission: Inspects texts.
        peers: The other gateways.
    """

    admission: Admission
    peers: Peers

    async def CheckText(
        self, request: pb.CheckTextRequest, context: GrpcCall
    ) -> pb.CheckTextResponse:
        """See the proto."""
        with self.admission.limits.counted(context.caller):
            violations = FieldViolations()
            check_labels(request.labels, violations)
            violations.raise_any()
            return await self._check(request, context)

    async def _check(self, request: pb.CheckTextRequest, context: GrpcCall) -> pb.CheckTextResponse:
        text = Conversation((Turn(USER, request.text),), raw=True)
        labels, timeout_s = dict(request.labels), guards_timeout_s(context)
        valid = ValidRequest(text, context.caller, labels, timeout_s)
        safety = await self.admission.check(RequestContext(CHECK, valid, untraced()))
        if len(safety.actions[0]) > ASIDE_FINDINGS:
            return await asyncio.to_thread(_checked, safety)
        return _checked(safety)

    async def GetDryRun(
        self, request: pb.GetDryRunRequest, context: GrpcCall
    ) -> pb.GetDryRunResponse:
        """See the proto."""
        if self.admission.in_force.policies.inspector.dry_run is None:
            raise NoDryRun("no policy is under trial; name one with safety.dry_run")
        answers, _ = await self.peers.query_all(GatewayQuery(dry_run=DryRunQuery()))
        return sum_dry_runs([answer.dry_run for answer in answers])

    async def answer_dry_run(self, _: DryRunQuery) -> GatewayReply:
        """Return what the dry run has counted at this gateway."""
        counts = self.admission.in_force.policies.inspector.dry_run
        if counts is None:
            return GatewayReply()
        moves = [
            pb.SafetyMove(rule=rule, now=_action(now), then=_action(then), count=count)
            for (rule, now, then), count in counts.moves.items()
        ]
        counted = pb.GetDryRunResponse(
            policy=counts.policy,
            texts=counts.texts,
            changed=counts.changed,
            moves=moves,
            gateways=[self.peers.gateway_id],
        )
        return GatewayReply(dry_run=counted)


def _checked(safety: RequestInspection) -> pb.CheckTextResponse:
    """Return the answer about the only text of an inspection."""
    blocked = bool(safety.blocked)
    return pb.CheckTextResponse(
        normalized_text=safety.normalized[0],
        text="" if blocked else safety.edited[0],
        findings=[*map(_finding, safety.actions[0]), *map(_failure, safety.entities.failed)],
        policy=safety.policy.version,
        blocked=blocked,
        model=safety.governed[0] if safety.governed else "",
    )


def _action(action: Action | None) -> "pb.SafetyAction.ValueType":
    return value_of(pb.SafetyAction, "unspecified" if action is None else action.name)


def _failure(failed: tuple[str, Action]) -> pb.SafetyFinding:
    """Return the finding of a token classifier that gave no answer; it has no place in the text."""
    rule, action = failed
    return pb.SafetyFinding(rule=rule, action=_action(action))


def _finding(finding: TakenAction) -> pb.SafetyFinding:
    return pb.SafetyFinding(
        rule=finding.rule,
        severity=value_of(pb.SafetySeverity, finding.severity.name),
        action=_action(finding.action),
        start=finding.start,
        end=finding.end,
    )


def sum_dry_runs(answers: Sequence[pb.GetDryRunResponse]) -> pb.GetDryRunResponse:
    """Return the sums over all gateways that try the policy of the first."""
    same = [answer for answer in answers if answer.policy == answers[0].policy]
    moves: Counter[tuple[str, int, int]] = Counter()
    for answer in same:
        moves.update({(move.rule, move.now, move.then): move.count for move in answer.moves})
    return pb.GetDryRunResponse(
        policy=answers[0].policy,
        texts=sum(answer.texts for answer in same),
        changed=sum(answer.changed for answer in same),
        moves=[
            pb.SafetyMove(rule=rule, now=now, then=then, count=count)  # type: ignore[arg-type]
            for (rule, now, then), count in moves.most_common()
        ],
        gateways=[name for answer in same for name in answer.gateways],
    )
