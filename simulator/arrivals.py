"""Generated traffic: streams of arrivals, each with its process, lengths and caller.

A stream is written ``kind:key=value,...``:

- ``poisson``: ``rate`` requests a second, independent of each other.
- ``bursty``: on and off for exponential times (a Markov-modulated Poisson process) of ``on_s`` (2) and ``off_s`` (8) in
  the mean; ``rate`` is the mean over both, ``idle`` (0.1) the rate when off as a share of the rate when on.
- ``diurnal``: ``rate`` goes up and down by ``swing`` (0.8, a share of it) as a sine over ``period_s`` (86400).
- ``flood``: ``count`` at once.

Keys of all: ``class``, ``tenant``, ``workload``, ``timeout_s``, ``start_s``, ``lengths`` (a mix by name), ``prompt``
and ``answer``, ``max_tokens`` (unset: a caller allows what the answer takes).

Lengths in tokens are written ``200`` (always), ``uniform/50/150`` (bounds) or ``lognormal/200/1/4096`` (median, sigma,
cap).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

from simulator.trace import Arrival, Fields, SimulationError
from sluice.wire.subjects import CLASSES

_T = TypeVar("_T")

ARRIVALS_MAX: Final = 5_000_000
"""More of one stream would fill the memory of a workstation."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    tokens: int

    def draw(self, rng: Random) -> int:
        """One length."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform from ``low`` to ``high``."""

    low: int
    high: int

    def draw(self, rng: Random) -> int:
        """One length."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """The logarithm is normal; ``cap`` cuts the tail off."""

    median: float
    sigma: float
    cap: int

    def draw(self, rng: Random) -> int:
        """One length."""
        return max(1, min(self.cap, round(rng.lognormvariate(math.log(self.median), self.sigma))))


Lengths = Fixed | Uniform | Lognormal
"""Draws lengths of at least 1 token."""


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Prompts and answers of one kind of traffic."""

    prompt: Lengths
    answer: Lengths


def _of_mean(mean: float, sigma: float, cap: int) -> Lognormal:
    """The lognormal with this mean before the cap."""
    return Lognormal(mean / math.exp(sigma**2 / 2), sigma, cap)


MIXES: Final = {
    "sharegpt": LengthMix(_of_mean(161.31, 1.0, 2048), _of_mean(337.99, 0.8, 2048)),
    "alpaca": LengthMix(_of_mean(19.31, 0.5, 512), _of_mean(58.45, 0.9, 512)),
    "desk": LengthMix(Uniform(25, 90), Uniform(5, 60)),
}
"""Mixes by name. The means of the first two are those of the data sets as Kwon et al. measured them ("Efficient Memory
Management for Large Language Model Serving with PagedAttention", SOSP 2023, figure 11: prompts and answers of ShareGPT
161.31 and 337.99 tokens, of Alpaca 19.31 and 58.45); the spread is ours, chosen for tails like those of their
histograms. ``desk`` is about what the support tasks of the shipped tiers have (docs/concepts/tiers.md)."""


def parse_lengths(text: str) -> Lengths:
    """Parses a distribution of lengths.

    Raises:
        SimulationError: ``text`` is not a distribution.
    """
    name, *numbers = text.split("/")
    try:
        match name, [float(n) for n in numbers]:
            case _, [] if name.isdigit() and int(name) >= 1:
                return Fixed(int(name))
            case "uniform", [low, high] if 1 <= low <= high:
                return Uniform(int(low), int(high))
            case "lognormal", [median, sigma, cap] if median >= 1 and sigma >= 0 and cap >= 1:
                return Lognormal(median, sigma, int(cap))
    except ValueError:
        pass
    raise SimulationError(
        f"{text!r} is no length in tokens: write 200, uniform/50/150 (bounds) or "
        "lognormal/200/1/4096 (median, sigma, cap)"
    )


@dataclass(frozen=True, slots=True)
class Caller:
    """The fields that all arrivals of a stream share."""

    mix: LengthMix
    priority_class: str = "standard"
    tenant: str = "default"
    workload: str = ""
    timeout_s: float | None = None
    max_tokens: int | None = None

    def arrive(self, at_s: float, rng: Random) -> Arrival:
        """One request."""
        prompt, answer = self.mix.prompt.draw(rng), self.mix.answer.draw(rng)
        most = answer if self.max_tokens is None else self.max_tokens
        return Arrival(
            at_s=at_s,
            prompt_tokens=prompt,
            answer_tokens=min(answer, most),
            max_tokens=most,
            priority_class=self.priority_class,
            tenant=self.tenant,
            workload=self.workload,
            timeout_s=self.timeout_s,
        )


Times = Callable[[Random, float], Iterator[float]]
"""Arrival times, seconds from 0 to a bound, ascending."""


@dataclass(frozen=True, slots=True)
class ArrivalStream:
    """One source of requests."""

    times: Times
    caller: Caller
    start_s: float = 0.0

    def arrivals(self, seconds: float, seed: int) -> Iterator[Arrival]:
        """The requests of the first ``seconds`` of the trace."""
        if seconds <= self.start_s:
            return
        rng = Random(seed)
        for number, at_s in enumerate(self.times(rng, seconds - self.start_s)):
            if number >= ARRIVALS_MAX:
                raise SimulationError(f"more than {ARRIVALS_MAX} arrivals in one stream")
            yield self.caller.arrive(self.start_s + at_s, rng)


def generate(streams: Sequence[ArrivalStream], seconds: float, seed: int) -> list[Arrival]:
    """The trace of all streams together, in order of time."""
    arrivals = [
        arrival
        for number, stream in enumerate(streams)
        for arrival in stream.arrivals(seconds, seed * 1_000_003 + number)
    ]
    if not arrivals:
        raise SimulationError(f"nothing arrives within {seconds:g} s")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def poisson(rate: float) -> Times:
    """``rate`` arrivals a second, independent of each other."""

    def times(rng: Random, seconds: float) -> Iterator[float]:
        at_s = rng.expovariate(rate)
        while at_s < seconds:
            yield at_s
            at_s += rng.expovariate(rate)

    return times


def bursty(rate: float, on_s: float, off_s: float, idle: float) -> Times:
    """Two states with exponential stays; ``rate`` is the mean over both."""
    on_rate = rate * (on_s + off_s) / (on_s + idle * off_s)

    def times(rng: Random, seconds: float) -> Iterator[float]:
        start, on = 0.0, rng.random() < on_s / (on_s + off_s)
        while start < seconds:
            end = min(seconds, start + rng.expovariate(1 / (on_s if on else off_s)))
            now = on_rate if on else on_rate * idle
            if now > 0:
                yield from (start + at_s for at_s in poisson(now)(rng, end - start))
            start, on = end, not on

    return times


def diurnal(rate: float, period_s: float, swing: float) -> Times:
    """A sine around ``rate`` that begins at its lowest; drawn by thinning."""
    peak = rate * (1 + swing)

    def times(rng: Random, seconds: float) -> Iterator[float]:
        for at_s in poisson(peak)(rng, seconds):
            now = rate * (1 - swing * math.cos(2 * math.pi * at_s / period_s))
            if rng.random() * peak < now:
                yield at_s

    return times


def flood(count: int) -> Times:
    """``count`` at once."""

    def times(rng: Random, seconds: float) -> Iterator[float]:
        return iter([0.0] * count)

    return times


def parse_stream(text: str) -> ArrivalStream:
    """Parses a stream of arrivals.

    Raises:
        SimulationError: an unknown kind or key, or an invalid value; the message names it.
    """
    kind, _, rest = text.partition(":")
    keys = Fields(_pairs(text, rest), f"{text!r}: ")
    stream = ArrivalStream(_times(kind, keys), _caller(keys), keys.number("start_s", 0.0))
    keys.check_all_taken()
    return stream


def _pairs(text: str, rest: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    for key, equals, _ in pairs:
        if not equals:
            raise SimulationError(f"{text!r}: {key!r} is not key=value")
    return {key: value for key, _, value in pairs}


def _times(kind: str, keys: Fields) -> Times:
    match kind:
        case "poisson":
            return poisson(keys.positive("rate"))
        case "bursty":
            rate, on_s = keys.positive("rate"), keys.positive("on_s", 2.0)
            return bursty(rate, on_s, keys.positive("off_s", 8.0), keys.number("idle", 0.1, most=1))
        case "diurnal":
            rate, period_s = keys.positive("rate"), keys.positive("period_s", 86_400.0)
            return diurnal(rate, period_s, keys.number("swing", 0.8, most=1))
        case "flood":
            return flood(keys.tokens("count"))
    raise SimulationError(f"no arrivals {kind!r}; there are poisson, bursty, diurnal, flood")


def _caller(keys: Fields) -> Caller:
    mix = keys.choice("lengths", MIXES, "sharegpt")
    prompt, answer = keys.text("prompt"), keys.text("answer")
    return Caller(
        mix=LengthMix(
            parse_lengths(prompt) if prompt else mix.prompt,
            parse_lengths(answer) if answer else mix.answer,
        ),
        priority_class=keys.choice("class", {name: name for name in CLASSES}, "standard"),
        tenant=keys.text("tenant") or "default",
        workload=keys.text("workload"),
        timeout_s=keys.positive("timeout_s") if "timeout_s" in keys else None,
        max_tokens=keys.tokens("max_tokens") if "max_tokens" in keys else None,
    )
