"""What callers of a class were promised, written ``interactive:ttft=0.5,latency=5``."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from simulator.failures import SimulationError
from simulator.outcome import Ending, Outcome
from sluice.wire.subjects import CLASSES


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds to the first token and to the end of the answer; infinite: no promise."""

    ttft_s: float = math.inf
    latency_s: float = math.inf

    def met(self, outcome: Outcome) -> bool:
        """Whether a request got what its class is promised."""
        ttft_s, latency_s = outcome.ttft_s, outcome.latency_s
        return (
            outcome.ending is Ending.FINISHED
            and ttft_s is not None
            and latency_s is not None
            and ttft_s <= self.ttft_s
            and latency_s <= self.latency_s
        )


DEFAULT_SLOS: Final[Mapping[str, Slo]] = {
    "interactive": Slo(ttft_s=0.5),
    "standard": Slo(ttft_s=5.0),
    "bulk": Slo(),
}
"""The time to the first token that the batcher's default policy aims at; bulk has to end, whenever."""


def parse_slos(texts: Iterable[str]) -> dict[str, Slo]:
    """The promises of all classes: `DEFAULT_SLOS` where ``texts`` say nothing.

    Raises:
        SimulationError: a text is none.
    """
    slos = dict(DEFAULT_SLOS)
    for text in texts:
        name, _, rest = text.partition(":")
        if name not in CLASSES:
            raise SimulationError(f"{text!r}: {name!r} is none of {', '.join(CLASSES)}")
        slos[name] = _parse(text, rest)
    return slos


def _parse(text: str, rest: str) -> Slo:
    found = {}
    for pair in rest.split(","):
        key, _, value = pair.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = math.nan
        if key not in ("ttft", "latency") or not seconds > 0:
            raise SimulationError(
                f"{text!r}: write CLASS:ttft=SECONDS,latency=SECONDS, one of the two is enough"
            )
        found[f"{key}_s"] = seconds
    return Slo(**found)
