"""What a jobs process shares between its jobs."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field

from opentelemetry.trace import Tracer

from jobs.gateways import GatewayClient
from jobs.quotas import Quotas
from jobs.store import JobStore
from jobs.uploads import ExternalAccess
from sluice.errors import InvalidRequest
from sluice.settings import JobsSettings
from sluice.telemetry.instruments import Instruments, Labels
from sluice.v1 import jobs_pb2 as pb


class JobStopped(Exception):
    """Raised if a job cannot continue: `code` for programs, the message says what to do.

    Attributes:
        state: the state that it stops in; by default it is paused for a person.
    """

    def __init__(
        self, code: str, message: str, state: "pb.JobState.ValueType" = pb.JOB_STATE_PAUSED
    ) -> None:
        super().__init__(message)
        self.code = code
        self.state = state


def input_unreadable(error: InvalidRequest) -> JobStopped:
    """Return the stop of a job whose input cannot be read as things are."""
    return JobStopped("INPUT_UNREADABLE", f"{error.message}; then resume the job")


def model_removed(model: str) -> JobStopped:
    """Return the stop of a job whose model was removed since it began: its items are not at fault."""
    message = f"model {model} is no longer served: configure it again, then resume the job"
    return JobStopped("MODEL_UNKNOWN", message)


@dataclass
class JobProcess:
    """One process, by its name.

    Attributes:
        quotas: usage of all tenants.
        outside: what jobs may reach outside of the mesh.
        items: counter of finished items, by outcome.
    """

    name: str
    settings: JobsSettings
    store: JobStore
    gateways: GatewayClient
    tracer: Tracer
    instruments: Instruments
    quotas: Quotas = field(init=False)
    outside: ExternalAccess = field(init=False)
    items: MutableMapping[Labels, float] = field(init=False)

    def __post_init__(self) -> None:
        self.quotas = Quotas(self.settings)
        self.outside = ExternalAccess(self.settings)
        self.items = self.instruments.counter("sluice.jobs.items")
