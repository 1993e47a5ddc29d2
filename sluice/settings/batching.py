"""Policies of the batcher: how tasks are ordered, how batches are filled, and named presets of that.

docs/concepts/batching.md describes the presets. A policy in the YAML file is the name of a preset, or a mapping whose
other keys override the preset:

    batcher:
      policy: {name: length, max_rows: 16, padding_max: 0.1}
"""

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from sluice.settings.base import Count, NotNegative, Positive, Section, Whole

PolicyName = Literal["fixed", "window", "adaptive", "priority", "length", "continuous"]

_DEFAULT: Final[PolicyName] = "continuous"

_WHOLE: Final[Mapping[str, Any]] = {
    "order": "arrival",
    "sends_to_idle": False,
    "waiting_tokens_max": math.inf,
}

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fixed": {**_WHOLE, "max_rows": 8, "wait_s": 0.1, "batches_running_max": 1},
    "window": {**_WHOLE, "wait_s": 0.05},
    "adaptive": {**_WHOLE, "wait_s": 0.05, "latency_target_s": 1.0},
    "priority": {**_WHOLE, "order": "class", "max_rows": 16, "wait_s": 0.1},
    "length": {
        **_WHOLE,
        "order": "fair",
        "sends_to_idle": True,
        "padding_max": 0.05,
        "batch_tokens_max": 16384,
        "wait_s": 0.1,
        "batches_running_max": 2,
    },
    "continuous": {},
}
"""What each name stands for, where it differs from the defaults of `Policy`. All but "continuous" are for engines that
compute a batch as a whole."""

WHOLE_ONLY: Final = (
    "batch_tokens_max",
    "padding_max",
    "bucket_ratio",
    "latency_target_s",
    "wait_s",
    "sends_to_idle",
    "batches_running_max",
)
"""Settings that make no difference to an engine that takes rows at every step."""


class ClassPolicy(Section):
    """The objectives of one class."""

    aging_s: Positive = math.inf
    """While tasks of the class wait, some of them go at least this often, before more urgent classes."""
    spare_rows: Whole = 0
    """Rows that the class leaves free for more urgent ones, while such are seen, in workers where it would not give
    its slots to them."""
    gather_s: float = Field(0.0, ge=0, le=3600)
    """How long tokens are gathered in the worker before they are sent, where the request does not say."""


class ClassPolicies(Section):
    """The classes, most urgent first."""

    interactive: ClassPolicy = ClassPolicy()
    standard: ClassPolicy = ClassPolicy(aging_s=2.0, gather_s=0.05)
    bulk: ClassPolicy = ClassPolicy(aging_s=10.0, spare_rows=8, gather_s=0.25)

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Keys that a class does not set keep their defaults."""
        if not isinstance(values, Mapping):
            return values
        return {name: _filled(name, fields) for name, fields in values.items()}


class Policy(Section):
    """How batches are formed. The defaults are the preset "continuous"."""

    name: PolicyName = _DEFAULT

    # The order.
    order: Literal["fair", "class", "arrival"] = "fair"
    """"fair": by class, deadlines and shares of tenants. "class": by class, then by arrival. "arrival": by arrival."""
    classes: ClassPolicies = ClassPolicies()
    takes_slots: bool = True
    """Where there is no room, rows go to a worker in which those of less urgent classes give way to them."""
    spare_s: NotNegative = 10.0
    """How long after the last task of a more urgent class rows are left free for the next."""
    horizon_s: Positive = 60.0
    """Upper limit on the time to a deadline in the order, so that no task waits behind all that came much later."""
    urgency: NotNegative = 2.0
    """A task is urgent when its time left is below this many times the service time of its class; 0: never."""
    urgent_lead_tokens: Whole = 8192
    """How far ahead of its fair share a tenant may get by urgent tasks."""

    # The size of a batch.
    max_rows: int = Field(32, ge=1, le=1024)
    """Most rows of a batch."""
    batch_tokens_max: Positive = math.inf
    """Most tokens to prefill in a batch, padding included where padding is limited."""
    padding_max: float = Field(1.0, ge=0, le=1)
    """Largest part of a batch that may be padding; 1: the engine does not pad, lengths make no difference."""
    bucket_ratio: float = Field(1.05, gt=1, le=4)
    """Each length bucket ends this much above the one before."""
    latency_target_s: Positive | None = None
    """If set, batches grow while they are answered well within this, and shrink when they take longer."""

    # When it goes.
    wait_s: float = Field(0.0, ge=0, le=10)
    """Longest wait for more rows."""
    sends_to_idle: bool = True
    """No wait while a worker would idle."""

    # Where it goes.
    batches_running_max: Count | None = None
    """Batches of which a worker still computes a row; unset: no limit."""
    waiting_tokens_max: Positive = 4096
    """Prompt tokens that may wait inside a worker: a longer backlog stays here, where it can be ordered."""
    output_quantile: float = Field(0.9, gt=0, lt=1)
    """Cache room is reserved for this quantile of the observed answer lengths of the tenant's workload."""

    @property
    def computes_whole(self) -> bool:
        """Whether it is for engines that compute a batch as a whole."""
        return self.name != _DEFAULT

    @property
    def pads(self) -> bool:
        """Whether lengths matter."""
        return self.padding_max < 1

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"name": values}
        if not isinstance(values, Mapping):
            return values
        preset = PRESETS.get(str(values.get("name", _DEFAULT)), {})
        return {**preset, **values}

    @model_validator(mode="after")
    def _says_nothing_in_vain(self) -> Self:
        for key in () if self.computes_whole else WHOLE_ONLY:
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(
                    f'{key}: makes no difference to "continuous": leave it out, or name a policy for engines'
                    " that compute a batch as a whole (docs/concepts/batching.md)"
                )
        return self

    def of_class(self, priority_class: str) -> ClassPolicy:
        """The objectives of the class."""
        policy = getattr(self.classes, priority_class)
        assert isinstance(policy, ClassPolicy)
        return policy


def _filled(name: str, fields: Any) -> Any:
    known = ClassPolicies.model_fields.get(name)
    if known is None or not isinstance(fields, Mapping):
        return fields
    return {**known.get_default().model_dump(), **fields}
