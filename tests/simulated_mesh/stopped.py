"""A backlog at two batchers of which one stands still for a while; no other fault."""

from typing import Final

from typing_extensions import override

from tests.simulated_mesh.processes import Request
from tests.simulated_mesh.world import QUIET_S, STEP_S, World

ASKED_AT_S: Final = 4.0
STOPPED_AT_S: Final = 4.5
STOPPED_S: Final = 12.0
ANSWER_S: Final = 2.0


class StoppedBatcherWorld(World):
    """The mesh of one seed. `run` raises when a worker does not give a stopped batcher's room to the other one."""

    @override
    def _many(self, most: int) -> int:
        return 2

    @override
    def _plan(self) -> None:
        self._step_s = STEP_S
        for number in range(100):
            self._at(ASKED_AT_S, lambda number=number: self._ask_for(number))
        self._at(STOPPED_AT_S, self.batchers[0].process.stop)
        self._at(STOPPED_AT_S + STOPPED_S, self.batchers[0].process.go_on)
        self._at(QUIET_S, self._calm)

    def _ask_for(self, number: int) -> None:
        request = Request(
            request_id=f"r{number}",
            prompt=self.chance.sample(range(5000), 20),
            max_tokens=round(ANSWER_S / STEP_S),
            priority_class="bulk",
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
