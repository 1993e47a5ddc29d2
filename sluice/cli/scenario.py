"""Options that `sluice simulate` and `sluice plan` share: the traffic, the workers and the objectives of classes."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from sluice.cli.failure import CommandFailed

if TYPE_CHECKING:
    from simulator.arrivals import LengthMix
    from simulator.cost import StepCost
    from simulator.engines import EngineLimits
    from simulator.fleet import ProcessCost
    from simulator.simulator import Setup
    from simulator.trace import Arrival
    from sluice.settings import Settings
    from sluice.settings.batching import Policy

_T = TypeVar("_T")

Trace = Annotated[
    Path | None,
    typer.Option(help="JSON lines, as `sluice record` writes them; see docs/simulation.md."),
]
Arrivals = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SPEC",
        help="Generated traffic instead of a trace, such as "
        '"poisson:rate=20,class=interactive,lengths=sharegpt"; may be repeated. '
        "Kinds: poisson, bursty, diurnal, flood.",
    ),
]
Seconds = Annotated[float, typer.Option(min=0.001, help="How long generated traffic arrives.")]
Seed = Annotated[int, typer.Option(help="Makes generated traffic repeatable.")]
Model = Annotated[
    str | None, typer.Option(metavar="NAME", help="Of a trace, only requests to this model.")
]
Cost = Annotated[
    str,
    typer.Option(
        metavar="NAME|FILE",
        help="What a step takes: a shipped cost, or a file of `sluice bench engine --fit`.",
    ),
]
EngineKind = Annotated[
    str, typer.Option(help="continuous: rows join at each step. padded: static batches.")
]
Slots = Annotated[int, typer.Option(min=1, help="Rows that a worker computes at once.")]
PrefillTokens = Annotated[
    int, typer.Option(min=0, help="Most prompt tokens of a step; 0: whole prompts.")
]
CacheTokens = Annotated[
    int, typer.Option(min=0, help="Tokens that fit a worker's cache; 0: only slots limit it.")
]
Preempts = Annotated[
    bool,
    typer.Option(
        "--preempts/--no-preempts", help="Whether urgent rows take slots of less urgent ones."
    ),
]
Slos = Annotated[
    list[str] | None,
    typer.Option(
        "--slo",
        metavar="CLASS:ttft=S,latency=S",
        help="SLO of a class; may be repeated.  [default: TTFT 0.5 s interactive, 5 s standard]",
    ),
]
Price = Annotated[
    float | None, typer.Option(min=0, metavar="PRICE", help="Of one worker and hour.")
]
Config = Annotated[
    Path | None,
    typer.Option(
        help='YAML file: its policy, called "config" here, weights of tenants, and limits.'
    ),
]
Admission = Annotated[
    bool,
    typer.Option(
        "--admission/--no-admission", help="Whether the gateway refuses what would be late."
    ),
]


def checked(make: Callable[[], _T], option: str | None = None) -> _T:
    """The result of ``make``; a simulation error names the option that caused it."""
    from simulator.trace import SimulationError

    try:
        return make()
    except SimulationError as error:
        where = f"{option}: " if option else ""
        raise CommandFailed("CANNOT_SIMULATE", f"{where}{error}") from error


def load_trace(
    trace: Path | None,
    arrivals: list[str] | None,
    seconds: float,
    seed: int,
    model: str | None = None,
) -> "list[Arrival]":
    """The traffic that was asked for, in order of time."""
    from simulator.arrivals import generate, parse_stream
    from simulator.trace import parse_trace

    if (trace is None) == (not arrivals):
        raise typer.BadParameter("give either --trace or --arrivals")
    if trace is None:
        return checked(
            lambda: generate([parse_stream(text) for text in arrivals or ()], seconds, seed),
            "--arrivals",
        )
    found = checked(lambda: parse_trace(_lines(trace)), str(trace))
    chosen = [arrival for arrival in found if model is None or arrival.model == model]
    if not chosen:
        raise CommandFailed("CANNOT_SIMULATE", f"{trace}: no request to model {model!r}")
    return chosen


def load_cost(name: str) -> "StepCost":
    """A shipped cost, or one fitted to the steps of a file."""
    from simulator.cost import SHIPPED, fit, named_cost, parse_samples

    if name in SHIPPED or not Path(name).is_file():
        return checked(lambda: named_cost(name), "--cost")
    return checked(lambda: fit(parse_samples(_lines(Path(name)))), name).cost


def cost_error(name: str) -> float:
    """The median error of the fit of a file's cost; of a shipped cost it was not kept, and is 0."""
    from simulator.cost import SHIPPED, fit, parse_samples

    if name in SHIPPED:
        return 0.0
    return checked(lambda: fit(parse_samples(_lines(Path(name)))), name).error


def load_process_costs(path: Path | None) -> "dict[str, ProcessCost]":
    """What a request costs each process: of a file, else as shipped."""
    from simulator.fleet import SHIPPED, parse_costs

    if path is None:
        return dict(SHIPPED)
    return checked(lambda: parse_costs(_lines(path)), str(path))


def load_policies(names: str, config: "Settings", model: str | None) -> "dict[str, Policy]":
    """Policies by name, in the order they were named; "config" is the configuration's for ``model``."""
    from sluice.settings.batching import PRESETS, Policy

    known = {name: Policy.model_validate(name) for name in PRESETS}
    known["config"] = config.batcher.policy_of(model) if model else config.batcher.policy
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen or [""]:
        if name not in known:
            raise typer.BadParameter(f"no policy {name!r}; there are {', '.join(known)}")
    return {name: known[name] for name in chosen}


def load_settings(config: Path | None) -> "Settings":
    """The configuration: policies, weights of tenants, and limits of gateway and batcher."""
    from sluice import settings

    return settings.load(config)


def load_mix(prompt: str, answer: str) -> "LengthMix":
    """Lengths of documents and their answers."""
    from simulator.arrivals import LengthMix, parse_lengths

    return LengthMix(
        checked(lambda: parse_lengths(prompt), "--prompt-tokens"),
        checked(lambda: parse_lengths(answer), "--answer-tokens"),
    )


def limits(
    slots: int,
    prefill_tokens: int,
    cache_tokens: int,
    preempts: bool,
    config: "Settings",
    model: str | None,
) -> "EngineLimits":
    """What a worker takes; blocks are as large as the configuration says for ``model``."""
    from simulator.engines import EngineLimits

    found = EngineLimits(
        slots=slots, prefill_tokens=prefill_tokens, cache_tokens=cache_tokens, preempts=preempts
    )
    block_tokens = next((m.block_tokens for m in config.models if m.name == model), None)
    return replace(found, block_tokens=block_tokens or found.block_tokens)


def setup(
    policy: "Policy",
    config: "Settings",
    *,
    cost: str,
    engine: str,
    limits: "EngineLimits",
    admission: bool,
    workers: int = 1,
    until: float | None = None,
) -> "Setup":
    """What is simulated."""
    from simulator.engines import ENGINES
    from simulator.simulator import Setup

    kind = next((kind for kind in ENGINES if kind == engine), None)
    if kind is None:
        raise typer.BadParameter(f"no engine {engine!r}; there are {', '.join(ENGINES)}")
    return Setup(
        policy=policy,
        cost=load_cost(cost),
        workers=workers,
        limits=limits,
        engine=kind,
        weights=config.weights,
        prefetch_rows=config.batcher.prefetch_rows,
        queue_max=config.gateway.queue_max if admission else None,
        until_s=until,
    )


def _lines(file: Path) -> Iterable[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed("CANNOT_SIMULATE", f"{file} cannot be read: {error}") from error
