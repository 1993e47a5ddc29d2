"""`sluice simulate` and `plan`: policies of the batcher under a load, and the number of workers that it needs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Final, Literal

from typer import BadParameter, Option

from cli import output
from cli.failure import CommandFailed
from sluice.wire.subjects import URGENT_CLASS

if TYPE_CHECKING:
    from simulator.arrivals import LengthMix
    from simulator.engines import EngineKind
    from simulator.measured import Costs
    from simulator.planner import JobPlan, TracePlan
    from simulator.results import ClassSummary, Slo, Summary
    from simulator.simulator import Setup
    from simulator.trace import Arrival
    from sluice.settings import Settings
    from sluice.settings.batching import Policy


ALL: Final = "all"
"""Of policies: all presets, on both engines."""
DEFAULT: Final = "default"
"""What `engine: generate` has where the configuration names no policy; that of the paged engine is a preset."""
ENGINE_NAMES: Final[tuple["EngineKind", ...]] = ("generate", "continuous")
MIXED: Final = (
    "poisson:rate=9,class=interactive,tenant=chat,prompt=lognormal/60/0.8/600,answer=lognormal/30/0.6/120",
    "poisson:rate=6,class=standard,tenant=api,prompt=lognormal/200/0.9/900,answer=lognormal/60/0.6/200",
    "bursty:rate=6,class=bulk,tenant=job,prompt=lognormal/150/1.0/900,answer=lognormal/40/0.5/120",
)
"""Traffic of `--policies all` where none is named: three classes, short and long prompts."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What arrives: a trace or generated requests."""

    trace: Path | None = Option(
        None, help="JSON lines, as `sluice record` writes them; see docs/operate/simulation.md."
    )
    arrivals: list[str] | None = Option(
        None,
        help="Generated traffic instead of a trace, such as "
        '"poisson:rate=20,class=interactive,lengths=sharegpt"; may be repeated. '
        "Kinds: poisson, bursty, diurnal, flood.",
        metavar="SPEC",
    )
    seconds: float = Option(60.0, help="Duration of the generated traffic, in seconds.", min=0.001)
    seed: int = Option(1, help="Random seed of the generated traffic.")
    model: str | None = Option(
        None, help="Use only the trace's requests to this model.", metavar="NAME"
    )

    def load(self, by_default: Sequence[str] = ()) -> "list[Arrival]":
        """Return the requests in order of time; `by_default`: generated ones where nothing else is named."""
        from simulator.arrivals import generate, parse_stream
        from simulator.trace import parse_trace

        trace, model = self.trace, self.model
        arrivals: Sequence[str] = self.arrivals or (() if trace else by_default)
        if (trace is None) == (not arrivals):
            raise BadParameter("give either --trace or --arrivals")
        if trace is None:
            return generate([parse_stream(text) for text in arrivals], self.seconds, self.seed)
        with reported(f"{trace}: "):
            arrivals_read = parse_trace(trace.read_text(encoding="utf-8").splitlines())
        chosen = [arrival for arrival in arrivals_read if model is None or arrival.model == model]
        if not chosen:
            raise CommandFailed("CANNOT_SIMULATE", f"{trace}: no request to model {model!r}")
        return chosen


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What a worker is, and the mesh around it."""

    config: Path | None = Option(
        None, help='YAML file: its policy, called "config" here, and weights of tenants.'
    )
    cost: str = Option(
        "large-cpu",
        help="Cost of a step: a shipped one, or a file of `sluice plan --measure` or `sluice bench engine --fit`.",
        metavar="NAME|FILE",
    )
    cores: int = Option(
        0,
        help="Cores that all workers share with the other processes, callers too, as measured in the file of --cost; "
        "0: workers have their own.",
        min=0,
        max=256,
    )
    engine: Literal["continuous", "generate"] | None = Option(
        None,
        help="continuous: the paged engine, which rows join at each step. generate: whole padded batches.  "
        "[default: continuous; both with --policies all]",
    )
    slots: int = Option(
        32, help="Maximum number of sequences that a worker computes at once.", min=1
    )
    prefill_tokens: int = Option(512, help="Most prompt tokens of a step; 0: whole prompts.", min=0)
    cache_tokens: int = Option(
        0, help="Tokens that fit a worker's cache; 0: only slots limit it.", min=0
    )
    admission: bool = Option(
        True, "--admission/--no-admission", help="Whether the gateway refuses what would be late."
    )

    def setups(
        self, policies: str, model: str | None, workers: int = 1, until_s: float | None = None
    ) -> "dict[str, Setup]":
        """Return the simulations by policy, or by "engine/policy" if both engines are compared, in the order named."""
        from simulator.engines import EngineLimits
        from simulator.simulator import Setup
        from sluice import settings
        from sluice.settings.batching import Policy
        from sluice.settings.models import DEFAULT_POLICIES

        mesh = settings.load(self.config)
        policies_by_name = _policies(policies, mesh, model)
        engine = self.engine or "continuous"
        costs = self.costs
        first = Setup(
            policy=next(iter(policies_by_name.values())),
            cost=costs.step,
            workers=workers,
            limits=EngineLimits(
                slots=self.slots,
                prefill_tokens=self.prefill_tokens,
                cache_tokens=self.cache_tokens,
            ),
            engine=engine,
            weights=mesh.weights,
            admission=self.admission,
            until_s=until_s,
        )
        if self.cores:
            if costs.mesh is None:
                raise CommandFailed(
                    "CANNOT_SIMULATE",
                    "--cores: --cost names no file that says what sharing them does",
                )
            sharing = replace(costs.mesh.sharing, cores=self.cores)
            first = replace(first, links=costs.mesh.links, sharing=sharing)
        if policies != ALL or self.engine:
            return {
                name: replace(first, policy=policy) for name, policy in policies_by_name.items()
            }
        default = Policy().named(DEFAULT_POLICIES["generate"])
        return {
            f"{engine}/{name}": replace(first, policy=policy, engine=engine)
            for engine in ENGINE_NAMES
            for name, policy in {**policies_by_name, DEFAULT: default}.items()
            if engine == "generate" or name != DEFAULT
        }

    @cached_property
    def costs(self) -> "Costs":
        """What --cost names."""
        from simulator.cost import SHIPPED, named_cost
        from simulator.measured import Costs, parse_costs

        name = self.cost
        if name in SHIPPED or not Path(name).is_file():
            return Costs(named_cost(name))
        with reported(f"{name}: "):
            return parse_costs(Path(name).read_text(encoding="utf-8").splitlines())


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """What the classes want, and what a worker costs."""

    slo: list[str] | None = Option(
        None,
        help="SLO of a class; may be repeated.  [default: TTFT 0.5 s interactive, 5 s standard]",
        metavar="CLASS:ttft=S,latency=S",
    )
    worker_hour_price: float | None = Option(
        None, help="Price of one worker for one hour.", min=0, metavar="PRICE"
    )

    def slos(self) -> "dict[str, Slo]":
        """Return the latency objectives by class."""
        from simulator.results import parse_slos

        return parse_slos(self.slo or ())


@contextmanager
def reported(where: str = "") -> Iterator[None]:
    """Report an error of the simulation as one of the command; `where` begins its message."""
    from simulator.trace import SimulationError

    try:
        yield
    except (SimulationError, UnicodeDecodeError) as error:
        raise CommandFailed("CANNOT_SIMULATE", f"{where}{error}") from error


def _policies(names: str, mesh: "Settings", model: str | None) -> "dict[str, Policy]":
    """Return the policies by name, in the order of `names`; "config" is the configuration's for `model`."""
    from sluice.settings.batching import PRESETS, Policy

    by_name = {name: Policy.model_validate(name) for name in PRESETS}
    if names == ALL:
        return by_name
    served = mesh.model(model) if model else None
    by_name["config"] = mesh.policy_of(served) if served else mesh.batcher.policy
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen or [""]:
        if name not in by_name:
            raise BadParameter(f"no policy {name!r}; there are {', '.join(by_name)}")
    return {name: by_name[name] for name in chosen}


@reported()
def simulate(
    *,
    traffic: Traffic,
    policies: str = Option(
        "continuous",
        help='Policies of the batcher to compare; "all": each preset on both engines, or on that '
        "of --engine, on a mixed trace unless one is named.",
        metavar="A,B,C|all",
    ),
    workers: int = Option(1, help="", min=1, max=4096),
    worker_options: Workers,
    objectives: Objectives,
    until: float | None = Option(
        None,
        help="Stop at this time, in seconds.  [default: when all requests have ended]",
        min=0.001,
    ),
) -> None:
    """Replay traffic in virtual time, and compare batching policies.

    Recorded or generated traffic runs through the batcher's own code. Prints time to first token and latency per
    class, goodput under the SLOs, the longest wait, padding, utilization and cost. `--policies all` prints one short
    table instead: all policies, on both engines unless `--engine` names one; nothing is refused then.
    """
    from simulator.results import summarize
    from simulator.simulator import simulate as run

    is_comparison = policies == ALL
    arrivals, slos = traffic.load(MIXED if is_comparison else ()), objectives.slos()
    if is_comparison:
        worker_options = replace(worker_options, admission=False)
    setups = worker_options.setups(policies, traffic.model, workers, until)
    summaries = {
        name: summarize(run(arrivals, setup), slos, objectives.worker_hour_price)
        for name, setup in setups.items()
    }
    described = {name: asdict(summary) for name, summary in summaries.items()}
    show_summaries = show_comparison if is_comparison else show
    output.show({"policies": described}, lambda: show_summaries(summaries))


def show_comparison(summaries: "Mapping[str, Summary]") -> None:
    """Print a row for each engine and policy: times of all requests, and first tokens of interactive ones."""
    headers = ("policy", "padding", "tokens/s", "ttft p50", "p95", "total p50", "p95")
    rows = []
    for name, s in summaries.items():
        first = next((c.ttft_s for c in s.classes if c.priority_class == URGENT_CLASS), None)
        columns = (s.ttft_s, s.latency_s, first)
        cells = (one and f"{getattr(one, p):.3f}" for one in columns for p in ("p50", "p95"))
        rows.append((name, f"{s.padding_share:.1%}", f"{s.tokens_per_s:.0f}", *cells))
    output.write_table((*headers, "interactive p50", "p95"), rows)


def show(summaries: "Mapping[str, Summary]") -> None:
    """Print the summaries of several policies: their classes, and their workers, in 100 columns at most."""
    classes = [(name, c) for name, summary in summaries.items() for c in summary.classes]
    output.write_records([_class_of(name, c) for name, c in classes], keys=2)
    print()
    output.write_records([_totals_of(name, s) for name, s in summaries.items()], keys=1)


def _class_of(policy: str, c: "ClassSummary") -> dict[str, object]:
    return {
        "policy": policy,
        "class": c.priority_class,
        "arrived": c.arrived,
        "finished": c.finished,
        "expired": c.expired,
        "refused": c.refused,
        "open": c.open,
        "longest wait": c.longest_wait_s,
        "goodput/s": c.goodput_per_s,
        "in slo": f"{c.within_slo:.1%}",
        **{f"ttft {name}": value for name, value in asdict(c.ttft_s).items()},
        **{f"latency {name}": value for name, value in asdict(c.latency_s).items()},
    }


def _totals_of(policy: str, s: "Summary") -> dict[str, object]:
    return {
        "policy": policy,
        "workers": s.workers,
        "tokens/s": s.tokens_per_s,
        "padding": f"{s.padding_share:.1%}",
        "rows/batch": s.rows_per_batch,
        "utilization": f"{s.utilization:.1%}",
        "slots used": f"{s.occupancy:.1%}",
        "cost": s.cost,
        "per M tokens": s.cost_per_million_tokens,
    }


@dataclass(frozen=True, kw_only=True)
class Documents:
    """A job of documents instead of traffic, and the processes that it needs."""

    documents: int | None = Option(None, help="Plan a job of this many documents instead.", min=1)
    hours: float = Option(24.0, help="Maximum duration of the job.", min=0.001)
    prompt_tokens: str = Option(
        "lognormal/500/0.7/4096",
        help="Length of a document: 900, or lognormal/900/0.6/4096.",
        metavar="LENGTHS",
    )
    answer_tokens: str = Option(
        "lognormal/60/0.5/512", help="Length of each answer, in the same form.", metavar="LENGTHS"
    )
    zones: int = Option(3, help="Number of zones; with 2 or more, one may fail.", min=1)
    headroom: float = Option(0.3, help="Share of each process that stays free.", min=0, max=0.9)

    def lengths(self) -> "LengthMix":
        """Return the lengths of documents and of their answers."""
        from simulator.arrivals import LengthMix, parse_lengths

        return LengthMix(parse_lengths(self.prompt_tokens), parse_lengths(self.answer_tokens))


@reported()
def plan(
    *,
    traffic: Traffic,
    job: Documents,
    share: float = Option(
        0.99, help="Share of each class that must meet its SLO.", min=0.01, max=1
    ),
    workers_max: int = Option(256, help="", min=1, max=4096),
    policy: str = Option("continuous", help="Policy of the batcher."),
    workers: Workers,
    measure: bool = Option(
        False,
        "--measure",
        help="First measure the costs of --model (small or large) on this machine, for minutes, "
        "into the file of --cost.",
    ),
    objectives: Objectives,
) -> None:
    """Compute how many workers a load needs.

    The load is a trace under SLOs, or a job of documents in a given time. A trace is simulated with more and fewer
    workers, a job by the rate at which one of them answers a sample of it.
    """
    from simulator.fleet import Sizing
    from simulator.planner import plan_job, plan_trace

    if measure:
        _measure(Path(workers.cost), traffic.model or "large")
    setups = workers.setups(policy, traffic.model)
    if len(setups) != 1:
        raise BadParameter(f"{policy!r} is more than one policy")
    (setup,) = setups.values()
    price = objectives.worker_hour_price
    if job.documents is None:
        arrivals, slos = traffic.load(), objectives.slos()
        planned = plan_trace(
            arrivals, setup, slos, share=share, workers_max=workers_max, worker_hour_price=price
        )
        output.show(asdict(planned), lambda: _show_trace(planned))
        return
    if traffic.trace is not None or traffic.arrivals:
        raise BadParameter("give either --documents or traffic")
    costs = workers.costs
    computed = plan_job(
        job.documents,
        job.hours,
        job.lengths(),
        setup,
        seed=traffic.seed,
        sizing=Sizing(job.headroom, job.zones),
        cost_error=costs.error,
        processes=costs.processes,
        worker_hour_price=price,
    )
    output.show(asdict(computed), lambda: _show_job(computed))


def _measure(file: Path, model: str) -> None:
    """Write the costs of this machine to a file."""
    from cli.bench import run
    from simulator.cost import SHIPPED

    if str(file) in SHIPPED:
        raise BadParameter("--measure needs --cost FILE")
    lines = run("processes", "--json", "--runs", "5", stdout=PIPE)
    lines += run("simulation", "--json", "--fit", "--model", model, stdout=PIPE)
    file.write_text(lines, encoding="utf-8")


def _show_trace(planned: "TracePlan") -> None:
    summaries = {f"{planned.workers} workers": planned.summary}
    if planned.one_less is not None:
        summaries[f"{planned.workers - 1} workers"] = planned.one_less
    show(summaries)
    print(f"\n{planned.workers} workers meet the SLOs")


def _show_job(job: "JobPlan") -> None:
    rows = [
        ("documents a second needed", job.documents_per_s),
        ("documents a second of one worker", job.worker_documents_per_s),
        ("worker hours", job.worker_hours),
        ("cost", job.cost),
        ("workers, nothing to spare", job.workers),
    ]
    output.write_table((f"{job.documents} documents in {job.hours:g} h", ""), rows)
    print()
    kinds = [
        {
            "process": kind.name,
            "full ones needed": f"{kind.needed:.3g} +- {kind.error:.0%}",
            "in all zones": kind.processes,
            "by the error": f"{kind.low} to {kind.high}",
        }
        for kind in job.fleet
    ]
    output.write_records(kinds)
