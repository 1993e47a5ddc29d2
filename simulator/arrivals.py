"""Generated traffic: streams of arrivals, each with its process, lengths and caller.

A stream is written `kind:key=value,...`:

- `poisson`: `rate` requests per second, independent of each other.
- `bursty`: on and off for exponential times (a Markov-modulated Poisson process) of `on_s` (2) and
  `off_s` (8) on average; `rate` is the mean over both, `idle` (0.1) the rate when off as a share of
  the rate when on.
- `diurnal`: `rate` goes up and down by `swing` (0.8, a share of it) as a sine over `period_s` (86400).
- `flood`: `count` at once.

Keys of all: `class`, `tenant`, `workload`, `timeout_s`, `start_s`, `lengths` (a mix by name),
`prompt` and `answer`, `max_tokens` (unset: a caller allows what the answer takes).

Lengths in tokens are written `200` (always), `uniform/50/150` (bounds) or `lognormal/200/1/4096`
(median, sigma, cap).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from typing_extensions import override

from simulator.trace import Arrival, Name, PriorityClass, Seconds, SimulationError, Tokens

ARRIVALS_MAX: Final = 5_000_000
"""Arrivals of one stream; more would fill the memory of a workstation."""


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform from `low` to `high`."""

    low: int
    high: int

    def draw(self, rng: Random) -> int:
        """Draw a length."""
        return self.low if self.low == self.high else rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lognormal; `cap` cuts off the tail."""

    median: float
    sigma: float
    cap: int

    def draw(self, rng: Random) -> int:
        """Draw a length."""
        return max(1, min(self.cap, round(rng.lognormvariate(math.log(self.median), self.sigma))))


Lengths = Uniform | Lognormal
"""Distribution of lengths of at least 1 token."""


@dataclass(frozen=True, slots=True)
class LengthMix:
    """Prompt and answer lengths of one kind of traffic."""

    prompt: Lengths
    answer: Lengths


def _of_mean(mean: float, sigma: float, cap: int) -> Lognormal:
    """Return the lognormal with this mean before the cap."""
    return Lognormal(mean / math.exp(sigma**2 / 2), sigma, cap)


MIXES: Final = {
    "sharegpt": LengthMix(_of_mean(161.31, 1.0, 2048), _of_mean(337.99, 0.8, 2048)),
    "alpaca": LengthMix(_of_mean(19.31, 0.5, 512), _of_mean(58.45, 0.9, 512)),
    "desk": LengthMix(Uniform(25, 90), Uniform(5, 60)),
}
"""Mixes by name. The means of the first two are those of the data sets as Kwon et al. measured them
("Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023,
figure 11); the spread is chosen for tails like those of their histograms. `desk` resembles the
support tasks of the shipped tiers (docs/concepts/tiers.md)."""


def parse_lengths(text: str) -> Lengths:
    """Parse a distribution of lengths.

    Raises:
        SimulationError: `text` is not a distribution.
    """
    name, *numbers = text.split("/")
    try:
        match name, [float(n) for n in numbers]:
            case _, [] if name.isdigit() and int(name) >= 1:
                return Uniform(int(name), int(name))
            case "uniform", [low, high] if 1 <= low <= high:
                return Uniform(int(low), int(high))
            case "lognormal", [median, sigma, cap] if median >= 1 and sigma >= 0 and cap >= 1:
                return Lognormal(median, sigma, int(cap))
    except (ValueError, OverflowError):
        pass
    raise SimulationError(
        f"{text!r} is no length in tokens: write 200, uniform/50/150 (bounds) or "
        "lognormal/200/1/4096 (median, sigma, cap)"
    )


WrittenLengths = Annotated[Lengths, PlainValidator(parse_lengths)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


class ArrivalStream(ABC, BaseModel):
    """A source of requests: their times and what they share. Every kind has these fields as keys.

    Times and lengths are drawn in turn from one generator, so a change of lengths also changes later times.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    lengths: Literal["sharegpt", "alpaca", "desk"] = "sharegpt"
    prompt: WrittenLengths | None = None
    answer: WrittenLengths | None = None
    priority_class: PriorityClass = "standard"
    tenant: Name = "default"
    workload: Name = ""
    timeout_s: Positive | None = None
    max_tokens: Tokens | None = None
    start_s: Seconds = 0.0

    @abstractmethod
    def times(self, rng: Random, seconds: float) -> Iterator[float]:
        """Yield ascending times of arrival below `seconds`, counted from `start_s`."""

    def arrivals(self, seconds: float, seed: int) -> Iterator[Arrival]:
        """Yield the requests of the first `seconds` of the trace.

        Raises:
            SimulationError: there are more than `ARRIVALS_MAX`.
        """
        if seconds <= self.start_s:
            return
        rng, mix = Random(seed), MIXES[self.lengths]
        prompts, answers = self.prompt or mix.prompt, self.answer or mix.answer
        for number, at_s in enumerate(self.times(rng, seconds - self.start_s)):
            if number >= ARRIVALS_MAX:
                raise SimulationError(f"more than {ARRIVALS_MAX} arrivals in one stream")
            prompt, answer = prompts.draw(rng), answers.draw(rng)
            max_tokens = self.max_tokens or answer
            yield Arrival(
                at_s=self.start_s + at_s,
                prompt_tokens=prompt,
                answer_tokens=min(answer, max_tokens),
                max_tokens=max_tokens,
                priority_class=self.priority_class,
                tenant=self.tenant or "default",
                workload=self.workload,
                timeout_s=self.timeout_s,
            )


def generate(streams: Sequence[ArrivalStream], seconds: float, seed: int) -> list[Arrival]:
    """Return the trace of all streams together, in order of time.

    Raises:
        SimulationError: nothing arrives, or more than `ARRIVALS_MAX` in one stream.
    """
    arrivals = [
        arrival
        for number, stream in enumerate(streams)
        for arrival in stream.arrivals(seconds, seed * 1_000_003 + number)
    ]
    if not arrivals:
        raise SimulationError(f"nothing arrives within {seconds:g} s")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _poisson(rate: float, rng: Random, seconds: float) -> Iterator[float]:
    at_s = rng.expovariate(rate)
    while at_s < seconds:
        yield at_s
        at_s += rng.expovariate(rate)


class Poisson(ArrivalStream):
    """Arrivals at `rate` per second, independent of each other."""

    rate: Positive

    @override
    def times(self, rng: Random, seconds: float) -> Iterator[float]:
        return _poisson(self.rate, rng, seconds)


class Bursty(ArrivalStream):
    """Two states with exponential durations; `rate` is the mean over both."""

    rate: Positive
    on_s: Positive = 2.0
    off_s: Positive = 8.0
    idle: Share = 0.1

    @override
    def times(self, rng: Random, seconds: float) -> Iterator[float]:
        on_s, off_s = self.on_s, self.off_s
        # Choose the rate when on so that the mean over both states is `rate`.
        on_rate = self.rate * (on_s + off_s) / (on_s + self.idle * off_s)
        start, on = 0.0, rng.random() < on_s / (on_s + off_s)
        while start < seconds:
            end = min(seconds, start + rng.expovariate(1 / (on_s if on else off_s)))
            rate = on_rate if on else on_rate * self.idle
            if rate > 0:
                yield from (start + at_s for at_s in _poisson(rate, rng, end - start))
            start, on = end, not on


class Diurnal(ArrivalStream):
    """A sine around `rate` that starts at its lowest; drawn by thinning."""

    rate: Positive
    period_s: Positive = 86_400.0
    swing: Share = 0.8

    @override
    def times(self, rng: Random, seconds: float) -> Iterator[float]:
        # Thinning: draw at the peak rate, and keep each arrival with probability rate / peak.
        peak = self.rate * (1 + self.swing)
        for at_s in _poisson(peak, rng, seconds):
            rate = self.rate * (1 - self.swing * math.cos(2 * math.pi * at_s / self.period_s))
            if rng.random() * peak < rate:
                yield at_s


class Flood(ArrivalStream):
    """All `count` requests at once."""

    count: Tokens

    @override
    def times(self, rng: Random, seconds: float) -> Iterator[float]:
        return iter([0.0] * self.count)


KINDS: Final[Mapping[str, type[ArrivalStream]]] = {
    "poisson": Poisson,
    "bursty": Bursty,
    "diurnal": Diurnal,
    "flood": Flood,
}


def parse_stream(text: str) -> ArrivalStream:
    """Parse a stream of arrivals.

    Raises:
        SimulationError: an unknown kind or key, or an invalid value; the message names it.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise SimulationError(f"no arrivals {kind!r}; there are {', '.join(KINDS)}")
    try:
        return KINDS[kind].model_validate_strings(dict(map(_pair, filter(None, rest.split(",")))))
    except ValueError as error:
        raise SimulationError.of(error, repr(text)) from error


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{key!r} is not key=value")
    return key, value
