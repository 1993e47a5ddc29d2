"""Every metric: its name, kind, unit and labels, and which process emits it.

docs/reference/metrics.md has this as tables.

Labels are models, classes, workers, policies and fixed words. Tenants, requests and texts are not: they are unbounded.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import Final

from sluice.telemetry import names


class Kind(Enum):
    """The kind of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, eq=False)
class Metric:
    """One metric.

    Attributes:
        unit: of OpenTelemetry: "s", "{token}", "1" for a share; empty: none.
        labels: names of its attributes.
        what: for the documentation and the page.
        services: the processes that emit it; empty: all.
        bounds: of the buckets of a histogram.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    what: str
    services: tuple[str, ...]
    bounds: tuple[float, ...] = ()

    @cached_property
    def page_name(self) -> str:
        """The name that Prometheus knows, without the endings of counters and histograms."""
        name, word = self.name.replace(".", "_"), _UNIT_WORDS.get(self.unit, "")
        return f"{name}_{word}" if word else name

    @cached_property
    def page_labels(self) -> tuple[str, ...]:
        """The labels as Prometheus knows them."""
        return tuple(label.replace(".", "_") for label in self.labels)

    @cached_property
    def page_bounds(self) -> tuple[str, ...]:
        """The bounds of the buckets as Prometheus knows them, the last one included."""
        return (*(str(float(bound)) for bound in self.bounds), "+Inf")


_UNIT_WORDS: Final = {"s": "seconds", "1": "ratio"}

SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0),
)
"""Bucket bounds of the time to the first token, from OpenTelemetry's GenAI conventions."""
_REQUEST_SECONDS: Final = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12),
    *(10.24, 20.48, 40.96, 81.92),
)
"""Those of the duration of a request."""
_TOKEN_SECONDS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
"""Those of the time for a token."""
_ERROR_SHARES: Final = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0)
"""Those of the error of a prediction."""
STEP_SECONDS: Final = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08),
    *(0.16, 0.32, 0.64, 1.28, 5.12),
)
"""Bucket bounds of a step of an engine."""

_MODEL: Final = names.GEN_AI_RESPONSE_MODEL
_CLASS: Final = names.PRIORITY_CLASS
_GEN_AI: Final = (names.GEN_AI_OPERATION, names.GEN_AI_SYSTEM, _MODEL, _CLASS)
_OF_CLASS: Final = (_MODEL, _CLASS)
_OF_WORKER: Final = (_MODEL, names.WORKER_ADDRESS)
_OF_ROUTER: Final = (names.ROUTER_POLICY, names.ROUTER_VERSION, names.ROUTER_HEAD)

_COUNTER, _GAUGE, _HISTOGRAM = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_gateway = partial(Metric, services=(names.SERVICE_GATEWAY,))
_batcher = partial(Metric, services=(names.SERVICE_BATCHER,))
_jobs = partial(Metric, services=(names.SERVICE_JOBS,))

REQUESTS: Final = _gateway(
    "sluice.requests", _COUNTER, "{request}", (_MODEL, _CLASS, names.OUTCOME),
    "valid requests that have ended; the outcome is the finish reason in lower case, or the reason of the error; a "
    "request that ended before a model was asked has the model that it named, and no model label where it named none",
)  # fmt: skip
REFUSED: Final = _gateway(
    "sluice.requests.refused", _COUNTER, "{call}", (names.ERROR_REASON,),
    "calls of any method that ended with an error before they were a valid request, by its reason: unknown models, "
    "wrong fields, missing credentials, limits",
)  # fmt: skip
TOKENS: Final = _gateway(
    "sluice.tokens", _COUNTER, "{token}", (_MODEL, names.GEN_AI_TOKEN_TYPE),
    "tokens of prompts (`input`) and answers (`output`), all attempts of a cascade",
)  # fmt: skip
COST: Final = _gateway(
    "sluice.cost", _COUNTER, "", (_MODEL, names.CURRENCY),
    "what those tokens cost by the prices of the configuration",
)  # fmt: skip
CACHED: Final = _gateway(
    "sluice.cached_answers", _COUNTER, "{request}", _OF_CLASS,
    "requests that got the answer of an earlier equal one; they count as requests too, and not as tokens",
)  # fmt: skip
FIRST_TOKEN: Final = _gateway(
    names.GEN_AI_TTFT, _HISTOGRAM, "s", _GEN_AI,
    "from the arrival of a request to its first token", bounds=SECONDS,
)  # fmt: skip
TOKEN_TIME: Final = _gateway(
    "gen_ai.server.time_per_output_token", _HISTOGRAM, "s", _GEN_AI,
    "mean time between the tokens of an answer after its first one (inter-token latency), complete answers",
    bounds=_TOKEN_SECONDS,
)  # fmt: skip
DURATION: Final = _gateway(
    "gen_ai.server.request.duration", _HISTOGRAM, "s", (*_GEN_AI, names.ERROR_REASON),
    "from the arrival of a request to its end; `error.type` where it failed", bounds=_REQUEST_SECONDS,
)  # fmt: skip
PREDICTION_ERROR: Final = _gateway(
    "sluice.prediction.error", _HISTOGRAM, "", _OF_CLASS,
    "difference between predicted and actual time of an answer, divided by the actual one; answers whose time was "
    "predicted in whole and that waited for a worker for at least 50 ms", bounds=_ERROR_SHARES,
)  # fmt: skip
ROUTES: Final = _gateway(
    "sluice.routes", _COUNTER, "{request}", (_MODEL, names.ROUTE_STRATEGY, names.ROUTE_DEGRADED),
    "routing decisions: the model that was asked first, by strategy; `true` when a request was degraded",
)  # fmt: skip
ESCALATIONS: Final = _gateway(
    "sluice.escalations", _COUNTER, "{request}", (names.MODEL_FROM, _MODEL),
    "answers that went from one model to another",
)  # fmt: skip
RECOVERIES: Final = _gateway(
    "sluice.recoveries", _COUNTER, "{request}", (_MODEL, _CLASS),
    "answers that another process continued after the first one was lost",
)  # fmt: skip
SAFETY_ACTIONS: Final = _gateway(
    "sluice.safety.actions", _COUNTER, "{finding}", (names.SAFETY_ACTION, names.SAFETY_TARGET),
    "findings of the safety rules and guards by what was done, in prompts (`input`) and answers (`output`)",
)  # fmt: skip
RUNNING: Final = _gateway(
    "sluice.requests.running", _GAUGE, "{request}", (), "calls that run in this gateway",
)  # fmt: skip
PREPARING: Final = _gateway(
    "sluice.requests.preparing", _GAUGE, "{request}", (_CLASS,),
    "requests of which no row was sent yet: they wait for their turn, or are inspected, routed and tokenized",
)  # fmt: skip
ROOM_WAITING: Final = _gateway(
    "sluice.room.waiting", _GAUGE, "{row}", _OF_CLASS,
    "rows that wait in this gateway until a batcher has room for them",
)  # fmt: skip
ROOM_OLDEST: Final = _gateway(
    "sluice.room.oldest_age", _GAUGE, "s", _OF_CLASS, "how long the oldest of them has waited",
)  # fmt: skip
RESENDS: Final = _gateway(
    "sluice.rows.resent", _COUNTER, "{row}", (*_OF_CLASS, names.RECOVERED_FROM),
    "rows that were sent again because their `worker` or their `batcher` was lost",
)  # fmt: skip
DEAD_LETTERS: Final = _gateway(
    "sluice.dead_letters", _COUNTER, "{task}", _OF_CLASS, "tasks that became dead letters",
)  # fmt: skip
INPUT_DRIFT: Final = _gateway(
    "sluice.router.input_drift", _GAUGE, "", _OF_ROUTER,
    "population stability index of the predicted gains: [routing.md](../concepts/routing.md#drift)",
)  # fmt: skip
ACCURACY_BIAS: Final = _gateway(
    "sluice.router.accuracy_bias", _GAUGE, "", _OF_ROUTER,
    "mean of outcome less predicted chance; below 0 the router is too optimistic",
)  # fmt: skip
BRIER: Final = _gateway(
    "sluice.router.brier", _GAUGE, "", _OF_ROUTER,
    "mean squared difference of outcome and predicted chance",
)  # fmt: skip
DRIFTED: Final = _gateway(
    "sluice.router.drifted", _GAUGE, "", (*_OF_ROUTER, names.DRIFT_SIGNAL),
    "1 while the `inputs` or the `accuracy` of a router have drifted, else 0",
)  # fmt: skip

QUEUED: Final = _batcher(
    "sluice.queue.tasks", _GAUGE, "{task}", _OF_CLASS, "tasks that wait in this batcher",
)  # fmt: skip
QUEUED_TOKENS: Final = _batcher(
    "sluice.queue.tokens", _GAUGE, "{token}", _OF_CLASS, "their prompts and expected answers",
)  # fmt: skip
OLDEST: Final = _batcher(
    "sluice.queue.oldest_age", _GAUGE, "s", _OF_CLASS, "how long the oldest of them has waited",
)  # fmt: skip
EXPECTED_WAIT: Final = _batcher(
    "sluice.queue.expected_wait", _GAUGE, "s", _OF_CLASS, "expected wait of a task that came now",
)  # fmt: skip
QUEUE_WAIT: Final = _batcher(
    "sluice.queue.wait", _HISTOGRAM, "s", _OF_CLASS,
    "how long rows waited until they were sent to a worker", bounds=SECONDS,
)  # fmt: skip
BATCHES: Final = _batcher(
    "sluice.batches", _COUNTER, "{batch}", (_MODEL, names.BATCH_CAUSE, names.BATCH_LIMIT),
    "batches sent, by why each was sent and why it was not larger",
)  # fmt: skip
BATCH_ROWS: Final = _batcher(
    "sluice.batch.rows", _COUNTER, "{row}", _OF_CLASS, "rows in them",
)  # fmt: skip
BATCH_TOKENS: Final = _batcher(
    "sluice.batch.tokens", _COUNTER, "{token}", (_MODEL,), "tokens of theirs to prefill, without padding",
)  # fmt: skip
PADDING_TOKENS: Final = _batcher(
    "sluice.batch.padding", _COUNTER, "{token}", (_MODEL,),
    "what padding to the longest row of each batch would add: divided by the sum with `sluice.batch.tokens` it is the "
    "padding share",
)  # fmt: skip
IN_FLIGHT: Final = _batcher(
    "sluice.rows.in_flight", _GAUGE, "{row}", (_MODEL,), "rows of this batcher in workers or on their way",
)  # fmt: skip
ROWS: Final = _batcher(
    "sluice.rows", _COUNTER, "{row}", (*_OF_CLASS, names.OUTCOME),
    "rows that ended in this batcher: `stop`, `length`, `cancelled`, `deadline`, `failed`, `refused` by a worker, "
    "`returned` to the gateway",
)  # fmt: skip

WORKER_LIVE: Final = _batcher(
    "sluice.worker.live", _GAUGE, "", _OF_WORKER, "1 while its engine answers, else 0",
)  # fmt: skip
WORKER_DRAINED: Final = _batcher(
    "sluice.worker.drained", _GAUGE, "", _OF_WORKER, "1 while it gets no new rows because an operator drained it",
)  # fmt: skip
WORKER_SLOTS: Final = _batcher(
    "sluice.worker.slots", _GAUGE, "{row}", _OF_WORKER, "rows it can compute at once",
)  # fmt: skip
WORKER_RUNNING: Final = _batcher(
    "sluice.worker.running", _GAUGE, "{row}", _OF_WORKER, "rows it computes, of all batchers",
)  # fmt: skip
WORKER_WAITING: Final = _batcher(
    "sluice.worker.waiting", _GAUGE, "{row}", _OF_WORKER, "rows that wait inside it",
)  # fmt: skip
WORKER_CACHE: Final = _batcher(
    "sluice.worker.kv_cache.usage", _GAUGE, "1", _OF_WORKER, "part of its KV cache that rows hold",
)  # fmt: skip
STEP_TIME: Final = _batcher(
    "sluice.worker.step.duration", _HISTOGRAM, "s", _OF_WORKER, "time of a step of its engine", bounds=STEP_SECONDS,
)  # fmt: skip
STEP_ROWS: Final = _batcher(
    "sluice.worker.step.rows", _COUNTER, "{row}", _OF_WORKER,
    "rows that got tokens, summed over all steps: divided by the number of steps it is the mean of rows a step",
)  # fmt: skip
WORKER_TOKENS: Final = _batcher(
    "sluice.worker.tokens", _COUNTER, "{token}", (*_OF_WORKER, names.GEN_AI_TOKEN_TYPE),
    "tokens of prompts (`input`) of rows that ended and tokens of answers (`output`)",
)  # fmt: skip
PREFIX_HITS: Final = _batcher(
    "sluice.worker.prefix_cache.hits", _COUNTER, "{token}", _OF_WORKER,
    "tokens of those prompts that were found in the prefix cache",
)  # fmt: skip
PREEMPTIONS: Final = _batcher(
    "sluice.worker.preemptions", _COUNTER, "{row}", _OF_WORKER, "rows that gave up their slot to a more urgent one",
)  # fmt: skip
DRAFTS: Final = _batcher(
    "sluice.worker.drafts", _COUNTER, "{token}", _OF_WORKER, "tokens drafted by speculative decoding",
)  # fmt: skip
DRAFTS_ACCEPTED: Final = _batcher(
    "sluice.worker.drafts.accepted", _COUNTER, "{token}", _OF_WORKER, "drafted tokens that were accepted",
)  # fmt: skip

JOBS: Final = _jobs(
    "sluice.jobs", _GAUGE, "{job}", (names.JOB_STATE,),
    "jobs that are kept, of all tenants, by state; every process counts all of them",
)  # fmt: skip
JOBS_RUNNING: Final = _jobs(
    "sluice.jobs.running", _GAUGE, "{job}", (), "jobs that this process runs",
)  # fmt: skip
JOB_ITEMS: Final = _jobs(
    "sluice.jobs.items", _COUNTER, "{item}", (names.OUTCOME,),
    "items with an outcome: `succeeded`, `deduplicated` (answered with that of an identical item), `dead`",
)  # fmt: skip
JOB_WINDOW: Final = _jobs(
    "sluice.jobs.window", _GAUGE, "{item}", (), "items that its jobs may have in flight",
)  # fmt: skip
JOB_IN_FLIGHT: Final = _jobs(
    "sluice.jobs.in_flight", _GAUGE, "{item}", (), "items that were sent to gateways and are not answered",
)  # fmt: skip
OLDEST_LEASE: Final = _jobs(
    "sluice.jobs.oldest_lease", _GAUGE, "s", (),
    "since the record of a running job was written, the longest of all: after 3 s another process takes the job",
)  # fmt: skip

SPANS: Final = Metric(
    "otel.sdk.exporter.span.exported", _COUNTER, "{span}", (names.ERROR_REASON,),
    "spans given to the OTLP endpoint; with `error.type` those that were lost: `export_failed`, `queue_full`", (),
)  # fmt: skip

METRICS: Final = tuple(each for each in list(globals().values()) if isinstance(each, Metric))
"""All of them, in the order of the documentation."""
