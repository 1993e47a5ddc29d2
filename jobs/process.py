"""What a process of jobs has for all of its jobs."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field

from opentelemetry.trace import Tracer

from jobs.gateways import Gateways
from jobs.quotas import Quotas
from jobs.store import JobStore
from jobs.uploads import Outside
from sluice.errors import InvalidRequest
from sluice.settings import JobsSettings
from sluice.telemetry import catalog
from sluice.telemetry.instruments import Instruments, Labels
from sluice.v1.jobs_pb2 import JOB_STATE_PAUSED, JobState


class JobStops(Exception):
    """The job goes no further: ``code`` for programs, the message says what to do.

    Attributes:
        state: that it stops in; by default it needs a person.
    """

    def __init__(
        self, code: str, message: str, state: "JobState.ValueType" = JOB_STATE_PAUSED
    ) -> None:
        super().__init__(message)
        self.code = code
        self.state = state


def input_unreadable(error: InvalidRequest) -> JobStops:
    """Its input cannot be read as things are."""
    return JobStops("INPUT_UNREADABLE", f"{error.message}; then resume the job")


def model_removed(model: str) -> JobStops:
    """Return the stop of a job whose model was there when the job began: its items are not at fault."""
    message = f"model {model} is no longer served: configure it again, then resume the job"
    return JobStops("MODEL_UNKNOWN", message)


@dataclass
class JobProcess:
    """One process, by its name.

    Attributes:
        quotas: the use of all tenants.
        outside: what jobs may reach outside of the mesh.
        items: how many items have ended, by what became of them.
    """

    name: str
    settings: JobsSettings
    store: JobStore
    gateways: Gateways
    tracer: Tracer
    instruments: Instruments
    quotas: Quotas = field(init=False)
    outside: Outside = field(init=False)
    items: MutableMapping[Labels, float] = field(init=False)

    def __post_init__(self) -> None:
        self.quotas = Quotas(self.settings)
        self.outside = Outside(self.settings)
        self.items = self.instruments.counter(catalog.JOB_ITEMS)
