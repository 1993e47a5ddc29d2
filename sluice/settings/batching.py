"""Policies of the batcher: one set of switches and limits, and named presets of it.

docs/concepts/batching.md describes the presets. A policy in the YAML file is the name of a preset, or a mapping whose
other
keys override the preset:

    batcher:
      policy: {name: length, max_rows: 16, padding_max: 0.1}
"""

import math
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from sluice.settings.base import Section

PolicyName = Literal["fixed", "window", "adaptive", "priority", "length", "continuous"]

_DEFAULT: Final[PolicyName] = "continuous"

_ALL_OFF: Final[Mapping[str, Any]] = {
    "by_class": False,
    "by_deadline": False,
    "by_tenant": False,
    "takes_slots": False,
    "sends_to_idle": False,
    "waiting_tokens_max": math.inf,
}

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fixed": {**_ALL_OFF, "max_rows": 8, "wait_s": 0.1, "batches_running_max": 1},
    "window": {**_ALL_OFF, "wait_s": 0.05},
    "adaptive": {**_ALL_OFF, "wait_s": 0.05, "latency_target_s": 1.0},
    "priority": {**_ALL_OFF, "by_class": True, "takes_slots": True, "max_rows": 16, "wait_s": 0.1},
    "length": {
        **_ALL_OFF,
        "by_class": True,
        "by_deadline": True,
        "by_tenant": True,
        "sends_to_idle": True,
        "padding_max": 0.05,
        "batch_tokens_max": 16384,
        "wait_s": 0.1,
        "batches_running_max": 2,
    },
    "continuous": {},
}
"""What each name stands for, where it differs from the defaults of `Policy`."""


class ClassPolicy(Section):
    """The objectives of one class."""

    aging_s: float = Field(math.inf, gt=0)
    """While tasks of the class wait, some of them go at least this often, before more urgent classes."""
    spare_rows: int = Field(0, ge=0)
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
    by_class: bool = True
    """More urgent classes go first; else classes make no difference."""
    by_deadline: bool = True
    """Early deadlines go first; else the order of arrival counts."""
    by_tenant: bool = True
    """Tenants share by weight in tokens; else tenants make no difference."""
    classes: ClassPolicies = ClassPolicies()
    aging_rows: int = Field(1, ge=1)
    """Rows that an overdue class may send before more urgent ones."""
    takes_slots: bool = True
    """Where there is no room, rows go to a worker in which those of less urgent classes give way to them."""
    spare_s: float = Field(10.0, ge=0)
    """How long after the last task of a more urgent class rows are left free for the next."""
    horizon_s: float = Field(60.0, gt=0)
    """Upper limit on the time to a deadline in the order, so that no task waits behind all that came much later."""
    urgency: float = Field(2.0, ge=0)
    """A task is urgent when its time left is below this many times the service time of its class; 0: never."""
    urgent_lead_tokens: int = Field(8192, ge=0)
    """How far ahead of its fair share a tenant may get by urgent tasks."""

    # The size of a batch.
    max_rows: int = Field(32, ge=1, le=1024)
    """Most rows of a batch."""
    batch_tokens_max: float = Field(math.inf, gt=0)
    """Most tokens to prefill in a batch, padding included where padding is limited."""
    padding_max: float = Field(1.0, ge=0, le=1)
    """Largest part of a batch that may be padding; 1: the engine does not pad, lengths make no difference."""
    bucket_ratio: float = Field(1.05, gt=1, le=4)
    """Each length bucket ends this much above the one before."""
    latency_target_s: float | None = Field(None, gt=0)
    """If set, batches grow while they are answered well within this, and shrink when they take longer."""

    # When it goes.
    wait_s: float = Field(0.0, ge=0, le=10)
    """Longest wait for more rows. An engine that takes rows at every step gains nothing from it: while a step runs,
    rows gather anyway."""
    sends_to_idle: bool = True
    """No wait while a worker would idle."""

    # Where it goes.
    batches_in_flight_max: int = Field(4, ge=1)
    """Batches on their way to one worker that it has not answered."""
    batches_running_max: int | None = Field(None, ge=1)
    """Batches of which a worker still computes a row; unset: no limit."""
    waiting_tokens_max: float = Field(4096, gt=0)
    """Prompt tokens that may wait inside a worker: a longer backlog stays here, where it can be ordered."""
    output_quantile: float = Field(0.9, gt=0, lt=1)
    """Cache room is reserved for this quantile of the observed answer lengths of the tenant's workload."""

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
