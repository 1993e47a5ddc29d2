"""The schema of the configuration file, with defaults for a mesh on this machine.

Values come from the YAML file, and single values from environment variables: `SLUICE_NATS__URL` sets `nats.url`,
and so does a file of that name in the folder SLUICE_SECRETS. Errors name the key (`SettingsError`).
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import yaml
from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from sluice.defaults import AUTO as AUTO
from sluice.defaults import DEFAULT_ADDRESS as DEFAULT_ADDRESS
from sluice.settings.base import (
    BYTES_MAX,
    NAME_MAX,
    Count,
    MebibytesOrNone,
    Name,
    NotNegative,
    Port,
    Positive,
    Section,
)
from sluice.settings.batching import PRESETS, Policy
from sluice.settings.environment import DELIMITER, PREFIX, VariableSource, read_variables
from sluice.settings.identity import IdentitySettings
from sluice.settings.limits import LimitSettings
from sluice.settings.models import ModelSettings
from sluice.settings.routing import RouteRule as RouteRule
from sluice.settings.routing import RoutingSettings as RoutingSettings
from sluice.settings.routing import TenantMatch
from sluice.settings.shipped import SPECIALIST_ROUTING, shipped_models, shipped_routing


@dataclass(frozen=True)
class CallShares:
    """Shares of `gateway.max_concurrent_requests`; calls above them are refused at once.

    Attributes:
        standard: of calls of class standard and bulk together; calls without a class count as standard.
        bulk: of calls of class bulk.
        tenant: of one tenant in the calls of a class.
    """

    standard: float = 0.75
    bulk: float = 0.5
    tenant: float = 0.8


class ProcessSettings(Section):
    """What gateways, batchers and processes of jobs have in common."""

    drain_s: NotNegative = 10.0
    """How long a process that stops lets running work end, in seconds."""


class GatewaySettings(ProcessSettings):
    """The gRPC server."""

    address: str = DEFAULT_ADDRESS
    """Where the gateway listens for gRPC, HOST:PORT; port 0 takes a free one in `sluice up`."""
    allow_remote: bool = False
    """Other machines may call although no credentials are asked for: only behind a network policy or a proxy."""
    max_message_bytes: int = Field(1024 * 1024, ge=1024, le=64 * 1024 * 1024)
    """Largest message of a call, in bytes."""
    audio_max_s: ClassVar[float] = 900.0
    """Longest audio of a request, in seconds; its bytes may exceed `max_message_bytes`. Bounds memory."""
    max_concurrent_requests: Count = 1024
    """Calls that are answered at the same time, of all methods."""
    shares: ClassVar[CallShares] = CallShares()
    """Shares of classes and tenants in `max_concurrent_requests`."""
    resume_key: str | None = Field(None, min_length=16, repr=False)
    """Key of the resume tokens, a secret of all gateways of a mesh; unset: the first one makes it, and JetStream keeps
    it. An embedded mesh has one in its state directory."""
    default_timeout_s: ClassVar[float] = 300.0
    """Time of a request whose caller set no deadline, in seconds."""
    max_timeout_s: ClassVar[float] = 3600.0
    """Upper bound for request deadlines, in seconds; later ones are clamped. Limits how long an abandoned request can
    run."""
    reader_buffer_tokens: ClassVar[int] = 2048
    """Tokens that may wait for a client that does not read. Bounds the memory of a slow reader."""
    stall_s: ClassVar[float] = 0.75
    """Silence of a run after which its batcher is queried, in seconds. A batcher that is silent for twice as long is
    lost, and its runs are sent again."""
    replay_entries: ClassVar[int] = 1024
    """Finished answers with an idempotency key that are cached for a replay."""
    replay_s: ClassVar[float] = 120.0
    """How long they are cached, in seconds."""
    connection_age_s: ClassVar[float] = 30.0
    """Age after which a client is told to reconnect, in seconds, so that added gateways get calls. Streams go on."""
    keepalive_s: ClassVar[float] = 30.0
    """How often an idle gRPC connection is pinged, in seconds, to find clients that are gone."""
    keepalive_timeout_s: ClassVar[float] = 10.0
    """How long a gRPC client may take to answer a ping, in seconds."""
    replicas: int = Field(1, ge=1, le=64)
    """Gateways that `sluice up` starts; the first has `address`, the others the ports behind it.
    docs/concepts/gateways.md."""


class HttpSettings(Section):
    """OpenAI's HTTP API, in the gateway; see docs/use/http.md."""

    address: str | None = None
    """Unset: 127.0.0.1:8000 in `sluice up`, and no HTTP in a gateway by itself. Null: no HTTP. Of several gateways the
    first has it, the others have the ports behind it."""
    hosts: tuple[str, ...] = ()
    """Names in the header "host" that are served beside those of this machine where callers show no credentials; "*":
    all. A web page can give its own name the address of the gateway, and browsers send that name."""
    keep_alive_s: ClassVar[float] = 75.0
    """How long a connection may be idle between two requests, in seconds: above the 60 s of most load balancers, so
    that the load balancer closes first."""
    stream_ping_s: Positive = 5.0
    """Silence after which a stream sends a comment (`: waiting`), in seconds. Proxies close silent connections after
    10 s or more. The first comment brings the head of the answer; an error after that is an event of the stream."""


class BatcherSettings(ProcessSettings):
    """Batch formation and the channel to the workers."""

    policy: Policy = Policy()
    """How batches are formed: a preset's name, or a mapping with a name and overrides; see
    docs/concepts/batching.md. Without a name: the default of each model's engine."""
    policies: dict[Name, Policy] = Field(default_factory=dict)
    """Policies of single models, by the model's name."""
    room_rows: ClassVar[int] = 1024
    """Requests of one class, model and gateway that may wait in a batcher; others wait in the gateway, but interactive
    ones never do. As many as a gateway admits."""
    room_bytes: ClassVar[int] = 128 * 1024 * 1024
    """Bytes of the tasks of a model that a batcher holds; gateways and classes share them. Bounds memory."""
    heartbeat_ms: ClassVar[int] = 250
    """Longest time between two reports of a worker that has requests, in milliseconds; `stall_s` is six of them."""
    stall_s: ClassVar[float] = 1.5
    """Silence after which a worker that has requests is lost, in seconds; its requests are sent again."""

    @property
    def idle_heartbeat_ms(self) -> int:
        """Longest time between two reports of a worker without requests, in milliseconds."""
        return int(500 * self.idle_stall_s)

    @property
    def idle_stall_s(self) -> float:
        """How long a worker without requests may be silent, in seconds; `stall_s` once a request is sent to it.

        Each report costs all processes of an idle mesh.
        """
        return 4 * self.stall_s


class TenantSettings(Section):
    """One tenant."""

    weight: float = Field(1.0, gt=0, le=1e6)
    """Its share of the workers under contention, relative to the other tenants."""
    limits: LimitSettings | None = None
    """Instead of the section `limits`."""
    retention_h: Positive | None = None
    """Hours for which its records, audit entries and outcomes are kept, where that is shorter than of all tenants."""


class ServerOfMesh(Section):
    """A server that `sluice up` embeds unless `url` names an external one."""

    url: str | None = None
    """Address of an external server; of NATS one, or those of a cluster with commas between them."""
    port: Port = 0
    """Port of the first embedded server, the others follow; 0 takes free ones."""


class NatsSettings(ServerOfMesh):
    """NATS."""

    connect_s: ClassVar[float] = 10.0
    """How long a process that starts waits for NATS, in seconds: a cluster elects a leader in 4 to 9 s."""
    replicas: Literal[1, 3, 5] = 1
    """Servers of a NATS cluster that keep each stream."""
    encryption_key: str | None = Field(None, pattern=r"^[A-Za-z0-9+/=_.-]{32,}$", repr=False)
    """The embedded server encrypts its files with it: records, audit, jobs and all else. A secret that belongs into the
    environment; without it the files cannot be read again."""


class TritonSettings(ServerOfMesh):
    """Triton; each worker has a server, and `port` is for gRPC."""

    start_s: Positive = 120.0
    """How long a server may take to load its model, in seconds."""


class RecordsSettings(Section):
    """Retention of request records (`sluice explain`) and of safety decisions (audit); both in JetStream."""

    max_mib: MebibytesOrNone = 256
    """Storage of records, in MiB; the oldest are deleted. 0: no records."""
    max_age_h: Positive = 72.0
    """Age after which records are deleted, in hours."""
    tenant_share: ClassVar[float] = 0.5
    """Share of `max_mib`, and of `audit_max_mib`, that one tenant's entries may take; above it the oldest are deleted,
    so that no tenant pushes out the entries of others."""
    audit_max_mib: MebibytesOrNone = 1024
    """Storage of the audit, in MiB; the oldest entries are deleted. 0: no audit."""
    audit_max_age_h: Positive = 24.0 * 365
    """Age after which entries of the audit are deleted, in hours."""
    audit_key: str | None = Field(None, min_length=16, repr=False)
    """Key of the hashes of prompts in the audit, for all gateways of a mesh; unset: no hashes."""
    audit_text_tenants: frozenset[str] = frozenset()
    """Tenants that want the text of their prompts in the audit."""

    @property
    def enabled(self) -> bool:
        """Whether records are kept."""
        return self.max_mib > 0

    @property
    def audit_enabled(self) -> bool:
        """Whether safety decisions are kept."""
        return self.audit_max_mib > 0


class CacheSettings(TenantMatch):
    """Answers that are kept for equal requests; see docs/concepts/cache.md."""

    enabled: bool = False
    """Whether answers are cached."""
    max_age_s: float = Field(3600.0, ge=1, le=30 * 24 * 3600)
    """Age after which a cached answer is deleted, in seconds."""
    max_mib: ClassVar[int] = 256
    """Storage of all answers in JetStream, in MiB; the oldest are deleted."""


class JobsSettings(ProcessSettings):
    """Offline jobs; see docs/use/jobs.md."""

    replicas: int = Field(1, ge=0, le=16)
    """Processes that `sluice up` starts; 0: no jobs."""
    address: str = "127.0.0.1:0"
    """Where a process serves and gateways reach it; port 0 takes a free one in `sluice up`. Gateways take several with
    commas between them, and a name may stand for several."""
    gateways: str | None = None
    """Addresses of the gateways that answer items, with commas between them; unset: `gateway.address`."""
    window_items: int = Field(512, ge=1, le=16_384)
    """Items that a process has in flight at the same time, of all its jobs."""
    running_max: ClassVar[int] = 16
    """Jobs that a process runs at the same time; their items share `window_items`."""
    inputs_max_bytes: int = Field(1024**3, ge=1024**2, le=BYTES_MAX)
    """Bytes of all inputs in JetStream, kept until their jobs are deleted. JetStream reserves them on its disk."""
    results_max_bytes: int = Field(1024**3, ge=1024**2, le=BYTES_MAX)
    """Bytes of all results in JetStream, kept until their jobs are deleted; reserved too."""
    tenant_share: ClassVar[float] = 0.5
    """Share of `running_max`, `inputs_max_bytes` and `results_max_bytes` that one tenant may take."""
    tenant_jobs_max: ClassVar[int] = 1000
    """Stored jobs of one tenant, finished ones included; of its uploads twice as many. Bounds the list of jobs."""
    input_prefixes: list[str] = Field(default_factory=list)
    """URLs below these may be inputs ("s3://bucket/prompts", "s3://bucket/{tenant}" for a folder of each tenant's own);
    unless listed none is opened. docs/use/job-inputs.md."""
    input_streams: dict[Name, list[str]] = Field(default_factory=dict)
    """Streams of JetStream, and of each the subjects that may be inputs ({PROMPTS: ["prompts.{tenant}.>"]}; without
    {tenant} they are those of all tenants); unless listed none is read. docs/use/job-inputs.md."""
    input_tenants: dict[str, list[Name]] = Field(default_factory=dict)
    """Of prefixes and streams listed above, those that only some tenants may use ({"s3://bucket/payroll": [hr]})."""
    private_hosts: list[str] = Field(default_factory=list)
    """Names and networks at private or loopback addresses that webhooks and inputs may reach, over http too."""

    @model_validator(mode="after")
    def _tenants_of_what_is_listed(self) -> Self:
        if strange := self.input_tenants.keys() - {*self.input_prefixes, *self.input_streams}:
            message = f"{min(strange)!r} is neither in input_prefixes nor in input_streams"
            raise ValueError(f"input_tenants: {message}")
        return self


Page = Literal["gateway", "batcher", "jobs", "triton", "nats"]
"""Processes that have a page of metrics. That of the batcher has the metrics of workers too; that of NATS is its HTTP
monitoring, JSON for its Prometheus exporter."""


class TelemetrySettings(Section):
    """Where traces and metrics go; see docs/operate/telemetry.md.

    OpenTelemetry's variables, such as OTEL_EXPORTER_OTLP_ENDPOINT, switch them on.
    """

    trace_ratio: float = Field(1.0, ge=0, le=1)
    """Part of the requests that are traced, whether their callers trace them or not. With OTEL_TRACES_SAMPLER the
    sampled flag of a caller decides."""
    otlp_http_endpoint: str | None = None
    """Where Triton sends its own spans, with the path /v1/traces: OTLP over HTTP as JSON, the only form that it has.
    Unset: port 4318 of the host of OTEL_EXPORTER_OTLP_ENDPOINT; with the protocol http/protobuf that endpoint itself.
    "none": nowhere.
    """
    prometheus: Mapping[Page, str | None] = Field(default_factory=dict)
    """Pages for Prometheus by process, "HOST:PORT" such as 127.0.0.1:9464; port 0 takes a free one, and the log says
    which. Further processes of a kind take the next ports. A process that is not named, or null, has no page."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level of log lines that are written."""
    log_format: Literal["text", "json"] = "text"
    """Format of the logs of gateways, batchers and processes of jobs; `sluice logs` reads both."""


class TlsSettings(Section):
    """Encryption; see docs/operate/security.md.

    A folder has the files of a Secret of cert-manager: tls.crt, tls.key and ca.crt.
    """

    embedded: bool = False
    """`sluice up` makes an authority in its state directory, and certificates for all that it starts."""
    mesh: Path | None = None
    """Folder of this process for calls between processes: it shows its certificate there, and accepts those of ca.crt.
    Unset: they are not encrypted."""
    callers: Path | None = None
    """Folder of the gateway's ports for callers; unset: `mesh`."""
    client_ca: Path | None = None
    """PEM file: callers must show a certificate of one of these authorities. Unset: they need none."""

    @property
    def serving(self) -> Path | None:
        """Folder of the gateway's ports."""
        return self.callers or self.mesh


class Settings(BaseSettings):
    """The whole file."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        env_prefix=PREFIX,
        env_nested_delimiter=DELIMITER,
        ser_json_inf_nan="constants",
    )

    models: tuple[ModelSettings, ...] = Field(default_factory=shipped_models)
    """Models to serve; unset: the shipped ones."""
    retiring: tuple[ModelSettings, ...] = ()
    """Models that were replaced or removed while the mesh ran, until their last rows have ended; `sluice reload` writes
    it (docs/operate/deploy.md)."""
    currency: str = Field("USD", pattern=r"^[A-Z]{3}$")
    """Currency of all prices and budgets, ISO 4217."""
    routing: RoutingSettings = SPECIALIST_ROUTING
    gateway: GatewaySettings = GatewaySettings()
    http: HttpSettings = HttpSettings()
    identity: IdentitySettings = IdentitySettings()
    batcher: BatcherSettings = BatcherSettings()
    nats: NatsSettings = NatsSettings()
    triton: TritonSettings = TritonSettings()
    jobs: JobsSettings = JobsSettings()
    cache: CacheSettings = CacheSettings()
    records: RecordsSettings = RecordsSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    tls: TlsSettings = TlsSettings()
    tenants: dict[Name, TenantSettings] = Field(default_factory=dict)
    """Tenants that differ from the default, by name."""
    limits: LimitSettings = LimitSettings()
    """Limits of every tenant without limits of its own; see docs/operate/limits.md."""
    safety: dict[str, Any] = Field(default_factory=dict)
    """Policies for prompts, see docs/concepts/safety.md. The gateway checks it."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Let variables win over the file, which arrives as arguments."""
        return VariableSource(settings_cls, read_variables()), init_settings

    @model_validator(mode="after")
    def _default_is_there(self) -> Self:
        """Use the shipped rules without `routing` if their models are there, else the first model that answers."""
        first = next((model.name for model in self.models if model.answers), None)
        if "routing" not in self.model_fields_set and first:
            routing = shipped_routing(self.models) or RoutingSettings(default=first)
            object.__setattr__(self, "routing", routing)
        return self

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        """Refuse sections that contradict each other; the message has a line for each."""
        if not self.models:
            raise ValueError("models: name at least one model")
        problems = [*self._name_problems(), *self._routing_problems(), *self._policy_problems()]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _name_problems(self) -> Iterator[str]:
        names = Counter(model.name for model in self.models)
        for name, count in names.items():
            if count > 1:
                yield f"models: {count} models have the same name, {name}; choose another one"
        tasks = Counter(model.task_name for model in self.served)
        for name, count in tasks.items():
            if (count > 1 and name not in names) or len(name) > NAME_MAX:
                yield f"models: {name}: choose another name or generation"
        for number, model in enumerate(self.models):
            if not model.answers and model.draft is not None:
                yield f"models.{number}.draft: engine {model.engine} draws no tokens; leave it out"
            if model.name == AUTO:
                yield f'models.{number}.name: "{AUTO}" is reserved for routing; choose another name'

    def _routing_problems(self) -> Iterator[str]:
        names = {model.name for model in self.models}
        others = {model.name: model.engine for model in self.models if not model.answers}
        silent = {model.name for model in self.models if not model.gives_logprobs}
        if len(others) == len(self.models) and self.routing == SPECIALIST_ROUTING:
            return  # nothing is routed, and nobody has set it
        for key, target in self.routing.all_models():
            if target in others:
                yield f"routing.{key}: {target!r} has engine {others[target]} and answers no prompts"
            elif target not in names:
                yield f"routing.{key}: no model {target!r}; {_meant(target, names)}"
            if target in silent and key.endswith("cascade.first"):
                yield (
                    f"routing.{key}: the server of {target!r} gives no log-probabilities of tokens, "
                    "by which a first answer is judged; only server.api tokens does"
                )

    def _policy_problems(self) -> Iterator[str]:
        names = {model.name for model in self.models}
        for name in sorted(self.batcher.policies.keys() - names):
            yield f"batcher.policies.{name}: there is no such model; {_meant(name, names)}"
        for model in self.models:
            for policy in self.policy_of(model).variants():
                yield from self._budget_problems(model, policy)

    def _budget_problems(self, model: ModelSettings, policy: Policy) -> Iterator[str]:
        """Name a budget of tokens that somebody has set, and that one prompt may exceed."""
        budget, own = policy.batch_tokens_max, model.name in self.batcher.policies
        if policy.is_continuous or budget == PRESETS[policy.name or ""].get("batch_tokens_max"):
            return
        if model.context_tokens is not None and budget < model.context_tokens:
            key = f"batcher.policies.{model.name}" if own else "batcher.policy"
            yield (
                f"{key}.batch_tokens_max: {budget:g} is less than one prompt of model"
                f" {model.name!r} may have, {model.context_tokens}"
            )

    def policy_of(self, model: ModelSettings) -> Policy:
        """Return how batches of `model` are formed."""
        policy = self.batcher.policies.get(model.name, self.batcher.policy)
        return policy.named(model.default_policy)

    @property
    def weights(self) -> dict[str, float]:
        """Shares of the tenants that differ from 1."""
        return {name: tenant.weight for name, tenant in self.tenants.items()}

    def retention_s(self, tenant: str) -> float | None:
        """Return how long records of `tenant` are kept, in seconds; None: as long as those of others."""
        own = self.tenants[tenant].retention_h if tenant in self.tenants else None
        return None if own is None else max(1.0, own * 3600)

    def limits_of(self, tenant: str) -> LimitSettings:
        """Return the limits of `tenant`: its own, or those of all."""
        own = self.tenants[tenant].limits if tenant in self.tenants else None
        return self.limits if own is None else own

    @property
    def served(self) -> tuple[ModelSettings, ...]:
        """All models that have workers."""
        return (*self.models, *self.retiring)

    def model(self, name: str) -> ModelSettings | None:
        """Return the model called `name`."""
        return next((model for model in self.models if model.name == name), None)

    def to_yaml(self) -> str:
        """Return these settings as a file, without the key of NATS's files, which must not lie beside them."""
        values = self.model_dump(mode="json", exclude={"nats": {"encryption_key"}})
        return yaml.safe_dump(values, sort_keys=False)


def _meant(name: str, names: Collection[str]) -> str:
    """Say which of the known names may be meant."""
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(names))}"
