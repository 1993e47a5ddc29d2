"""Backlogs at two batchers and two workers: no request may fail, and no slot may be free beside rows that wait."""

from typing import Final

from typing_extensions import override

from model_workers.engine.cacheless import EchoEngine
from tests.simulated_mesh.processes import Request
from tests.simulated_mesh.triton import CONTEXT_TOKENS, TritonServer
from tests.simulated_mesh.world import QUIET_S, STEP_S, World

SLOTS: Final = 4
PLACES_MORE: Final = 2
FAST_S: Final = 0.02
SLOW_S: Final = 0.1
"""What a step of a worker takes."""
BULK: Final = 120
INTERACTIVE: Final = 30
ASKED_AT_S: Final = 4.0
TOKENS: Final = {"bulk": 20, "interactive": 5}

STOPPED_AT_S: Final = 4.5
STOPPED_S: Final = 12.0
ANSWER_S: Final = 2.0


class BacklogWorld(World):
    """The mesh of one seed. `run` raises also when a request fails."""

    @override
    def _many(self, most: int) -> int:
        return 2

    def _ask_for(self, priority_class: str, max_tokens: int) -> None:
        number = len(self.requests)
        request = Request(
            request_id=f"r{number}",
            prompt=self.chance.sample(range(5000), 20),
            max_tokens=max_tokens,
            priority_class=priority_class,
            timeout_s=300.0,
        )
        self.requests.append(request)
        request.gateway = self.gateways[number % 2]
        request.gateway.process.soon(request.gateway.ask, request)

    @override
    def _sent(self, rows: int) -> int:
        return 0  # No slot is free beside rows that wait, whatever goes to others.

    @override
    def _check(self, request: Request) -> None:
        super()._check(request)
        assert request.error is None, request


class StoppedBatcherWorld(BacklogWorld):
    """One batcher stands still for a while; `run` raises when a worker does not give its room to the other one."""

    @override
    def _plan(self) -> None:
        self._step_s = STEP_S
        for _ in range(100):
            self._at(ASKED_AT_S, lambda: self._ask_for("bulk", round(ANSWER_S / STEP_S)))
        self._at(STOPPED_AT_S, self.batchers[0].process.stop)
        self._at(STOPPED_AT_S + STOPPED_S, self.batchers[0].process.go_on)
        self._at(QUIET_S, self._calm)


class MixedWorkersWorld(BacklogWorld):
    """Interactive requests beside the backlog; one worker is five times as fast; no fault."""

    @override
    def _build(self) -> None:
        super()._build()
        self.fast, self.slow = self.tritons.values()
        for triton, step_s in ((self.fast, FAST_S), (self.slow, SLOW_S)):
            triton.step_s = step_s
            triton.restart()
            assert triton.worker is not None
            triton.worker.engine = EchoEngine(
                SLOTS, PLACES_MORE, CONTEXT_TOKENS, triton.worker._step
            )

    @override
    def _plan(self) -> None:
        for _ in range(BULK):
            self._at(ASKED_AT_S, lambda: self._ask_for("bulk", TOKENS["bulk"]))
        for number in range(INTERACTIVE):
            self._at(
                ASKED_AT_S + 1 + 0.13 * number,
                lambda: self._ask_for("interactive", TOKENS["interactive"]),
            )
        self._at(QUIET_S, self._calm)

    def rows(self, triton: TritonServer) -> int:
        """Rows that its worker has computed."""
        assert triton.worker is not None
        assert triton.worker._worker is not None
        holders = triton.worker._worker._grants._holders.values()
        return sum(holder.sent_tasks for holder in holders)

    def took_s(self, priority_class: str) -> list[float]:
        """How long the answers of a class took, the shortest first."""
        chosen = [one for one in self.requests if one.priority_class == priority_class]
        return sorted((one.ended_at or 0.0) - one.asked_at for one in chosen)
