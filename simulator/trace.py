"""Traces: what arrived when, how long prompt and answer were, and who asked. No text.

A file holds one JSON object a line, in any order of time:

    {"at_s": 0.25, "prompt_tokens": 180, "answer_tokens": 55, "class": "interactive"}

| key | meaning | default |
|---|---|---|
| ``at_s`` | arrival, seconds since the trace began | required |
| ``prompt_tokens`` | at least 1 | required |
| ``answer_tokens`` | tokens that the answer had, at least 1 | required |
| ``max_tokens`` | what the caller allowed, at least ``answer_tokens`` | ``answer_tokens`` |
| ``class`` | interactive, standard or bulk | standard |
| ``tenant`` | who pays | default |
| ``workload`` | kind of work, the label "task" | empty |
| ``timeout_s`` | deadline, seconds behind the arrival | none |
| ``model`` | the model that was asked | empty |
| ``ttft_s``, ``latency_s`` | first token and end as a recording saw them, seconds behind the arrival | none |
"""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

from simulator.failures import SimulationError
from sluice.wire.subjects import CLASSES

NAME_CHARACTERS_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request; fields as in the table above, ``priority_class`` is ``class``."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    max_tokens: int
    priority_class: str = "standard"
    tenant: str = "default"
    workload: str = ""
    timeout_s: float | None = None
    model: str = ""
    ttft_s: float | None = None
    latency_s: float | None = None


def format_line(arrival: Arrival) -> str:
    """One line of a trace, without the line's end; what is unset is left out."""
    values = {("class" if k == "priority_class" else k): v for k, v in asdict(arrival).items()}
    return json.dumps({k: v for k, v in values.items() if v is not None and v != ""})


def parse_trace(lines: Iterable[str]) -> list[Arrival]:
    """The arrivals of a file, in order of time.

    Raises:
        SimulationError: a line is not as above, with its number; or there is none.
    """
    arrivals = [_parse(number, line) for number, line in _filled(lines)]
    if not arrivals:
        raise SimulationError("the trace has no arrivals")
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _filled(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _parse(number: int, line: str) -> Arrival:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise SimulationError(f"line {number}: is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise SimulationError(f"line {number}: is not a JSON object")
    try:
        return _Line(values).arrival()
    except SimulationError as error:
        raise SimulationError(f"line {number}: {error}") from error


class _Line:
    """The values of one line, taken out by key; what nobody took is unknown."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = dict(values)

    def arrival(self) -> Arrival:
        answer = self._tokens("answer_tokens", 1)
        arrival = Arrival(
            at_s=self._seconds("at_s"),
            prompt_tokens=self._tokens("prompt_tokens", 1),
            answer_tokens=answer,
            max_tokens=self._tokens("max_tokens", answer, answer),
            priority_class=self._name("class", "standard", CLASSES),
            tenant=self._name("tenant", "default"),
            workload=self._name("workload", ""),
            timeout_s=self._seconds_if_set("timeout_s"),
            model=self._name("model", ""),
            ttft_s=self._seconds_if_set("ttft_s"),
            latency_s=self._seconds_if_set("latency_s"),
        )
        if self._values:
            raise SimulationError(f"unknown key {next(iter(self._values))!r}")
        return arrival

    def _tokens(self, key: str, least: int, default: int | None = None) -> int:
        value = self._take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SimulationError(f"{key}: {value!r} is not a number of tokens from {least}")
        return value

    def _seconds(self, key: str) -> float:
        value = self._take(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise SimulationError(f"{key}: {value!r} is not a number of seconds")
        if not math.isfinite(value) or value < 0:
            raise SimulationError(f"{key}: {value!r} is not a number of seconds from 0")
        return float(value)

    def _seconds_if_set(self, key: str) -> float | None:
        return self._seconds(key) if key in self._values else None

    def _name(self, key: str, default: str, known: tuple[str, ...] = ()) -> str:
        value = self._take(key, default)
        if not isinstance(value, str) or len(value) > NAME_CHARACTERS_MAX:
            raise SimulationError(f"{key}: is not a name")
        if known and value not in known:
            raise SimulationError(f"{key}: {value!r} is none of {', '.join(known)}")
        return value

    def _take(self, key: str, default: Any = None) -> Any:
        value = self._values.pop(key, default)
        if value is None:
            raise SimulationError(f"{key} is missing")
        return value
