"""What token classifiers find in a prompt; the policy decides about it and the findings of rules alike."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.admission.overload import SchedulingParams
from gateway.safety.actions import Action
from gateway.safety.findings import Finding
from gateway.safety.guards.checks import Check, Cost, Decided, found_of
from gateway.safety.guards.families import Failure
from gateway.safety.inspector import NO_ENTITIES, FoundEntities, RequestInspection
from gateway.telemetry.spans import CallSpans
from gateway.validation.requests import ValidRequest


@dataclass(frozen=True)
class Asker:
    """The request that guard models are asked about.

    Attributes:
        spans: of its call; None: it is not traced.
    """

    request: ValidRequest
    request_id: str
    scheduling: SchedulingParams
    spans: CallSpans | None = None

    @property
    def deadline(self) -> float:
        """Monotonic seconds."""
        return self.scheduling.deadline


def asker_of(request: ValidRequest, request_id: str, now: float) -> Asker:
    """Of a request that wants no answer; ``now`` in monotonic seconds."""
    scheduling = SchedulingParams(request.priority_class, now + request.timeout_s)
    return Asker(request, request_id, scheduling)


@dataclass(frozen=True)
class Reading:
    """What a token classifier says of texts.

    Attributes:
        outcome: the entities in each text, by offset in it.
    """

    outcome: Sequence[Sequence[Finding]] | Failure
    cost: Cost

    def taken(self, check: Check) -> tuple[tuple[str, Action], ...]:
        """What is recorded of it."""
        if isinstance(self.outcome, Failure):
            return found_of(check.guard, self.outcome)
        return found_of(check.guard, [one for text in self.outcome for one in text])


class EntityReader(Protocol):
    """Asks token classifiers."""

    async def read(self, asker: Asker, check: Check, texts: Sequence[str]) -> Reading:
        """What the classifier of ``check`` finds in ``texts``; without an answer in time a `Failure`."""


async def find_entities(
    reader: EntityReader, inspection: RequestInspection, asker: Asker
) -> tuple[FoundEntities, tuple[Decided, ...]]:
    """What the classifiers of the policy find in the prompt, and what is recorded of each."""
    guards = [one for one in inspection.entity_guards if "input" in one.settings.checks]
    if not guards:
        return NO_ENTITIES, ()
    texts = inspection.normalized
    checks = [Check(number, guard) for number, guard in enumerate(guards, 1)]
    readings = await asyncio.gather(*(reader.read(asker, check, texts) for check in checks))
    by_text: list[list[Finding]] = [[] for _ in texts]
    failed: list[tuple[str, Action]] = []
    for check, reading in zip(checks, readings, strict=True):
        if isinstance(reading.outcome, Failure):
            failed += reading.taken(check)
            continue
        for found, mine in zip(by_text, reading.outcome, strict=True):
            found += mine
    decided = tuple(
        Decided(check, reading.taken(check), cost=reading.cost)
        for check, reading in zip(checks, readings, strict=True)
    )
    return FoundEntities(by_text, failed), decided
