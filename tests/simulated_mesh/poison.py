"""Requests that end each worker which computes them, beside others; two processes of each kind, no other fault."""

from collections.abc import Sequence
from typing import Final

from typing_extensions import override

from gateway.streaming.dispatch import LOSSES_MAX
from sluice.errors import EngineFailed
from sluice.wire.subjects import CLASSES
from tests.simulated_mesh.processes import Request
from tests.simulated_mesh.triton import POISON
from tests.simulated_mesh.world import QUIET_S, World

BURST_S: Final = 4.0
"""When most requests come: in one moment, the poisoned ones among them."""


class PoisonedWorld(World):
    """The mesh of one seed, with one to six poisoned requests among others.

    `run` raises also when one of the others fails, or a poisoned one does not end as given up.
    """

    @override
    def _many(self, most: int) -> int:
        return 2

    @override
    def _plan(self) -> None:
        chance = self.chance
        poisoned = chance.randrange(1, 7)
        for number in range(poisoned + chance.randrange(5, 40)):
            late_s = 0.0 if number < poisoned or chance.random() < 0.7 else chance.random() * 10
            head = [POISON] if number < poisoned else []
            self._at(BURST_S + late_s, lambda head=head: self._ask_with(head))
        self._at(QUIET_S, self._calm)

    def _ask_with(self, head: Sequence[int]) -> None:
        chance = self.chance
        request = Request(
            request_id=f"r{len(self.requests) + 1}",
            prompt=[*head, *chance.sample(range(5000), 20)],
            max_tokens=chance.randrange(1, 20),
            priority_class=chance.choice(CLASSES),
            timeout_s=300.0,
        )
        self.requests.append(request)
        request.gateway = chance.choice(self.gateways)
        request.gateway.process.soon(request.gateway.ask, request)

    @override
    def _check(self, request: Request) -> None:
        super()._check(request)
        if request.prompt[0] == POISON:
            assert isinstance(request.error, EngineFailed), request
        else:
            assert request.error is None, request

    def check_kills(self) -> None:
        """What the poisoned requests cost, and that they are given up by gateways, once each."""
        poisoned = sum(request.prompt[0] == POISON for request in self.requests)
        kills = sum(triton.kills for triton in self.tritons.values())
        given_up = sum(one.dispatch.given_up.total() for one in self.gateways)
        assert given_up == poisoned
        assert kills <= LOSSES_MAX * poisoned, kills
