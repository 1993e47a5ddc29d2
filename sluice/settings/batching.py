"""Policies of the batcher: when a batch is formed and which requests go along, and named presets of that.

The order of requests (classes, deadlines, fair shares) is the same under every policy; `Policy` holds its settings too.
docs/concepts/batching.md describes the presets. A policy in the YAML file is the name of a preset, or a mapping whose
other keys override the preset:

    batcher:
      policy: {name: length, max_rows: 16, padding_max: 0.1}
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, model_serializer, model_validator

from sluice.settings.base import Count, Positive, PositiveOrInfinite, Section
from sluice.settings.schedule import ScheduleEntry

PolicyName = Literal["fixed", "window", "adaptive", "priority", "length", "continuous"]

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fixed": {"max_rows": 8, "wait_s": 0.1, "batches_running_max": 1},
    "window": {"wait_s": 0.05},
    "adaptive": {"wait_s": 0.05, "latency_target_s": 1.0},
    "priority": {
        "max_rows": 16,
        "wait_s": 0.1,
        "classes": {"interactive": {"wait_s": 0.005}, "bulk": {"wait_s": 0.5}},
    },
    "length": {
        "padding_max": 0.05,
        "batch_tokens_max": 16384,
        "wait_s": 0.1,
        "batches_running_max": 2,
    },
    "continuous": {},
}
"""What each name stands for, where it differs from the defaults of `Policy`."""

STATIC_ONLY: Final = (
    "batch_tokens_max",
    "padding_max",
    "latency_target_s",
    "wait_s",
    "batches_running_max",
)
"""Settings that "continuous" does not read."""


WAITING_TOKENS_MAX: Final = 4096
"""Prompt tokens that may wait inside a worker under the policy "continuous": eight steps of prefill."""
COALESCE_S: Final[Mapping[str, float]] = {"interactive": 0.048, "standard": 0.05, "bulk": 0.25}
"""How long a worker coalesces the tokens of a class at most, in seconds, where the request does not say."""
COALESCE_STEP_S: Final = 0.024
"""How long tokens of interactive answers are coalesced where two sequences run, in seconds; doubled as more run, up to
`COALESCE_S`. A message costs a gateway and its caller about 0.3 ms: this bounds their part of a core to a few percent a
worker."""
SPARE_SLOTS: Final[Mapping[str, int]] = {"interactive": 0, "standard": 0, "bulk": 8}
"""Slots that a class leaves free for more urgent ones, while such arrive, in workers that do not preempt it."""


def coalesce_s(priority_class: str, running: int) -> float:
    """Return how long a worker with `running` sequences coalesces the tokens of a class, in seconds.

    Tokens of an interactive answer that runs alone go at once. The more run, the more of their tokens share a message,
    so that those messages do not delay the first tokens of others.
    """
    limit_s = COALESCE_S[priority_class]
    if priority_class != "interactive":
        return limit_s
    multiple = min(round(limit_s / COALESCE_STEP_S), running - 1)
    # A power of two, so that tokens of different sequences are due together and share reports.
    return COALESCE_STEP_S * 2 ** (multiple.bit_length() - 1) if multiple > 0 else 0.0


class ClassPolicy(Section):
    """The objectives of one class."""

    aging_s: PositiveOrInfinite = math.inf
    """While tasks of the class wait, some of them go at least this often, before more urgent classes."""
    wait_s: float | None = Field(None, ge=0, le=3600)
    """Longest wait for more requests of a batch; unset: the policy's `wait_s`."""


ClassName = Literal["interactive", "standard", "bulk"]
_CLASSES: Final[Mapping[str, Any]] = {
    "interactive": {},
    "standard": {"aging_s": 2.0},
    "bulk": {"aging_s": 10.0},
}
"""The objectives of the classes, most urgent first, where the policy does not set them."""


class Policy(Section):
    """How batches are formed. The defaults are the preset "continuous"."""

    name: PolicyName | None = None
    """The preset; unset: the default of the model's engine."""

    # The order.
    order: Literal["fair", "class", "arrival"] = "fair"
    """"fair": by class, deadlines and shares of tenants. "class": by class, then by arrival. "arrival": by arrival."""
    classes: Mapping[ClassName, ClassPolicy] = Field(default_factory=dict)
    """Objectives by class; what a class does not set keeps its default."""
    spare_s: ClassVar[float] = 10.0
    """How long after the last task of a more urgent class slots stay free for the next one, in seconds."""
    horizon_s: ClassVar[float] = 60.0
    """Longest time to a deadline that the order considers, in seconds, so that no task waits behind all later ones."""
    urgency: ClassVar[float] = 2.0
    """A task is urgent when its time left is below this many service times of its class."""
    urgent_lead_tokens: ClassVar[int] = 8192
    """How far ahead of its fair share urgent tasks may bring a tenant, in tokens."""
    bucket_ratio: ClassVar[float] = 1.05
    """Each length bucket ends this much above the one before; finer ones form smaller batches."""
    output_quantile: ClassVar[float] = 0.9
    """Quantile of the observed answer lengths of a tenant's workload for which KV cache is reserved."""

    # The size of a batch.
    max_rows: int = Field(32, ge=1, le=1024)
    """Most rows of a batch."""
    batch_tokens_max: PositiveOrInfinite = math.inf
    """Most tokens to prefill in a batch, padding included where padding is limited."""
    padding_max: float = Field(1.0, ge=0, le=1)
    """Largest part of a batch that may be padding; 1: the engine does not pad, lengths make no difference."""
    latency_target_s: Positive | None = None
    """If set, batches grow while their first tokens come well within this, and shrink when they take longer."""

    # When it goes.
    wait_s: float = Field(0.0, ge=0, le=10)
    """Longest wait for more requests, of classes without a `wait_s` of their own."""

    # Where it goes.
    batches_running_max: Count | None = None
    """Batches of which a worker still computes a sequence, those of all batchers; unset: no limit. Interactive and
    returned requests are exempt. "fixed" ends one batch before the next, "length" has one ready."""

    schedule: tuple[ScheduleEntry, ...] = ()
    """Overrides at times of the day; of several in force the last one wins."""

    _written: Mapping[str, Any] = PrivateAttr(default_factory=dict)
    """What somebody wrote of it, without the values of its preset: another preset replaces those."""

    @property
    def is_continuous(self) -> bool:
        """Whether it waits for no other requests, and forms no groups."""
        return self.name in (None, "continuous")

    @property
    def has_padding(self) -> bool:
        """Whether batches pad their prompts to one length."""
        return not self.is_continuous and self.padding_max < 1

    @property
    def sends_to_idle(self) -> bool:
        """Whether a batch goes at once while a worker would idle."""
        return self.name in (None, "continuous", "length")

    @property
    def waiting_tokens_max(self) -> float:
        """Prompt tokens that may wait inside a worker; a longer backlog stays in the batcher, which orders it."""
        return WAITING_TOKENS_MAX if self.is_continuous else math.inf

    def of_class(self, priority_class: str) -> ClassPolicy:
        """Return the objectives of a class."""
        return self.classes[priority_class]  # type: ignore[index]  # one of ClassName

    def window_s(self, priority_class: str) -> float:
        """Return the longest wait of a request of the class for others, in seconds."""
        if self.is_continuous:
            return 0.0
        own = self.of_class(priority_class).wait_s
        return self.wait_s if own is None else own

    def named(self, default: Mapping[str, Any]) -> "Policy":
        """Return the policy itself, or what it says over `default` where it names no preset."""
        return self if self.name else Policy.model_validate(merged(default, self._written))

    def at(self, moment: datetime) -> "Policy":
        """Return the policy in force at a moment, which has a time zone."""
        return self._with(entry for entry in self.schedule if entry.covers(moment))

    def variants(self) -> Sequence["Policy"]:
        """Return the policy and what each entry of its schedule makes of it."""
        return [self, *(self._with([entry]) for entry in self.schedule)]

    def _with(self, entries: Iterable[ScheduleEntry]) -> "Policy":
        values = {key: value for key, value in self._written.items() if key != "schedule"}
        for entry in entries:
            values = merged(values, entry.overrides)
        return Policy.model_validate(values)

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in(cls, values: Any, handler: Callable[[Any], Self]) -> Self:
        """Take the name of a preset for a policy, and put what is written over its values."""
        if isinstance(values, str):
            values = {"name": values}
        if not isinstance(values, Mapping):
            return handler(values)
        preset = PRESETS.get(str(values.get("name")), {})
        return handler(merged(merged({"classes": _CLASSES}, preset), values)).keep(values)

    def keep(self, written: Mapping[str, Any]) -> Self:
        """Keep what somebody wrote of the policy, and return the policy."""
        self._written = dict(written)
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        for number, entry in enumerate(self.schedule):
            if "schedule" in entry.overrides:
                raise ValueError(f"schedule.{number}.schedule: an entry has no schedule of its own")
            try:
                self._with([entry])
            except ValidationError as error:
                problem = error.errors()[0]
                key = ".".join(str(part) for part in ("schedule", number, *problem["loc"]))
                raise ValueError(f"{key}: {problem['msg']}") from None
        return self

    @model_serializer
    def _as_written(self) -> Mapping[str, Any]:
        return self._written


def policy_notes(policy: Policy, model: str, engine: str, *, streams: bool) -> Sequence[str]:
    """Return a line for what a policy does not change, for the log.

    Args:
        policy: The policy of the model.
        model: Name of the model.
        engine: Name of its engine.
        streams: Whether the engine admits requests at every step, and so pads nothing.
    """
    name = policy.name or "continuous"
    where = f"policy {name} for model {model}"
    if not policy.is_continuous:
        if not streams:
            return []
        why = "pads nothing" if policy.has_padding else "admits requests at every step"
        return [f"{where}: no gain, engine {engine} {why}"]
    fields = type(policy).model_fields
    unread = [key for key in STATIC_ONLY if getattr(policy, key) != fields[key].default]
    classes = policy.classes.items()
    unread += [f"classes.{name}.wait_s" for name, own in classes if own.wait_s is not None]
    return [f"{where}: no effect of {', '.join(unread)}, it has no window"] if unread else []


def merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with `overrides`; mappings of both are merged."""
    result = dict(values)
    for key, value in overrides.items():
        before = result.get(key)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        result[key] = merged(before, value) if both else value  # type: ignore[arg-type]
    return result
