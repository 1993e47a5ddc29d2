"""What tests of the simulator share."""

from simulator.arrivals import generate, parse_stream
from simulator.cores import Sharing
from simulator.cost import StepCost
from simulator.engines import EngineLimits
from simulator.simulator import Links, Setup
from simulator.trace import Arrival
from sluice.settings.batching import Policy

COST = StepCost(5e-3, 2e-5, 2e-4, 5e-7)
LINKS = Links(0.002, 0.001, 0.003)
SHARING = Sharing(2, request_s=4e-3, report_s=1e-3, token_s=1e-4, slowdown=0.5)
LIMITS = EngineLimits(slots=8)


def setup(policy: str = "continuous", **values: object) -> Setup:
    """A small mesh; ``values`` are fields of `Setup`."""
    given = {"policy": Policy(name=policy), "cost": COST, "links": LINKS, "limits": LIMITS}
    return Setup(**{**given, **values})  # type: ignore[arg-type]


def trace(*streams: str, seconds: float = 20.0, seed: int = 1) -> list[Arrival]:
    """What arrives."""
    return generate([parse_stream(text) for text in streams], seconds, seed)


def arrival(at_s: float, prompt: int = 10, answer: int = 5, **values: object) -> Arrival:
    """One request."""
    given = {"at_s": at_s, "prompt_tokens": prompt, "answer_tokens": answer, "max_tokens": answer}
    return Arrival(**{**given, **values})  # type: ignore[arg-type]
