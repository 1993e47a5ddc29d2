"""Options that `sluice simulate` and `sluice plan` share: the traffic, the workers and the objectives of classes."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from cli.failure import CommandFailed

if TYPE_CHECKING:
    from simulator.cost import StepCost
    from simulator.engines import EngineKind, EngineLimits
    from simulator.results import Slo
    from simulator.simulator import Setup
    from simulator.trace import Arrival
    from sluice.settings import Settings
    from sluice.settings.batching import Policy

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What arrives: a trace or generated requests."""

    trace: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines, as `sluice record` writes them; see docs/operate/simulation.md."
        ),
    ] = None
    arrivals: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Generated traffic instead of a trace, such as "
            '"poisson:rate=20,class=interactive,lengths=sharegpt"; may be repeated. '
            "Kinds: poisson, bursty, diurnal, flood.",
        ),
    ] = None
    seconds: Annotated[
        float, typer.Option(min=0.001, help="How long generated traffic arrives.")
    ] = 60.0
    seed: Annotated[int, typer.Option(help="Makes generated traffic repeatable.")] = 1
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of a trace, only requests to this model.")
    ] = None

    def load(self) -> "list[Arrival]":
        """In order of time."""
        from simulator.arrivals import generate, parse_stream
        from simulator.trace import parse_trace

        trace, arrivals, model = self.trace, self.arrivals or (), self.model
        if (trace is None) == (not arrivals):
            raise typer.BadParameter("give either --trace or --arrivals")
        if trace is None:
            return checked(
                lambda: generate(
                    [parse_stream(text) for text in arrivals], self.seconds, self.seed
                ),
                "--arrivals",
            )
        found = checked(lambda: parse_trace(lines_of(trace)), str(trace))
        chosen = [arrival for arrival in found if model is None or arrival.model == model]
        if not chosen:
            raise CommandFailed("CANNOT_SIMULATE", f"{trace}: no request to model {model!r}")
        return chosen


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What a worker is, and the mesh around it."""

    config: Annotated[
        Path | None,
        typer.Option(
            help='YAML file: its policy, called "config" here, weights of tenants, and limits.'
        ),
    ] = None
    cost: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="What a step takes: a shipped cost, or a file of `sluice bench engine --fit`.",
        ),
    ] = "large-cpu"
    engine: Annotated[
        str, typer.Option(help="continuous: rows join at each step. padded: static batches.")
    ] = "continuous"
    slots: Annotated[int, typer.Option(min=1, help="Rows that a worker computes at once.")] = 32
    prefill_tokens: Annotated[
        int, typer.Option(min=0, help="Most prompt tokens of a step; 0: whole prompts.")
    ] = 512
    cache_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens that fit a worker's cache; 0: only slots limit it.")
    ] = 0
    preempts: Annotated[
        bool,
        typer.Option(
            "--preempts/--no-preempts", help="Whether urgent rows take slots of less urgent ones."
        ),
    ] = True
    admission: Annotated[
        bool,
        typer.Option(
            "--admission/--no-admission", help="Whether the gateway refuses what would be late."
        ),
    ] = True

    def setups(
        self, policies: str, model: str | None, workers: int = 1, until_s: float | None = None
    ) -> "dict[str, Setup]":
        """What is simulated, by the names of the policies, in the order in which they were named."""
        from simulator.simulator import Setup
        from sluice import settings

        mesh = settings.load(self.config)
        found = _policies(policies, mesh, model)
        first = Setup(
            policy=next(iter(found.values())),
            cost=self._fitted()[0],
            workers=workers,
            limits=self._limits(mesh, model),
            engine=self._engine(),
            weights=mesh.weights,
            queue_max=mesh.gateway.queue_max if self.admission else None,
            until_s=until_s,
        )
        return {name: replace(first, policy=policy) for name, policy in found.items()}

    def cost_error(self) -> float:
        """The median error of the fit of a file's cost; of a shipped cost it was not kept, and is 0."""
        return self._fitted()[1]

    def _fitted(self) -> "tuple[StepCost, float]":
        """A shipped cost, or one fitted to the steps of a file with the error of the fit."""
        from simulator.cost import SHIPPED, fit, named_cost, parse_samples

        name = self.cost
        if name in SHIPPED or not Path(name).is_file():
            return checked(lambda: named_cost(name), "--cost"), 0.0
        found = checked(lambda: fit(parse_samples(lines_of(Path(name)))), name)
        return found.cost, found.error

    def _limits(self, mesh: "Settings", model: str | None) -> "EngineLimits":
        """What a worker takes; blocks are as large as the configuration says for ``model``."""
        from simulator.engines import EngineLimits

        found = EngineLimits(
            slots=self.slots,
            prefill_tokens=self.prefill_tokens,
            cache_tokens=self.cache_tokens,
            preempts=self.preempts,
        )
        block_tokens = next((m.block_tokens for m in mesh.models if m.name == model), None)
        return replace(found, block_tokens=block_tokens or found.block_tokens)

    def _engine(self) -> "EngineKind":
        from simulator.engines import ENGINES

        for kind in ENGINES:
            if kind == self.engine:
                return kind
        raise typer.BadParameter(f"no engine {self.engine!r}; there are {', '.join(ENGINES)}")


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """What the classes want, and what a worker costs."""

    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLASS:ttft=S,latency=S",
            help="SLO of a class; may be repeated.  [default: TTFT 0.5 s interactive, 5 s standard]",
        ),
    ] = None
    worker_hour_price: Annotated[
        float | None, typer.Option(min=0, metavar="PRICE", help="Of one worker and hour.")
    ] = None

    def slos(self) -> "dict[str, Slo]":
        """By class."""
        from simulator.results import parse_slos

        return checked(lambda: parse_slos(self.slo or ()), "--slo")


def checked(make: Callable[[], _T], option: str | None = None) -> _T:
    """The result of ``make``; a simulation error names the option that caused it."""
    from simulator.trace import SimulationError

    try:
        return make()
    except SimulationError as error:
        where = f"{option}: " if option else ""
        raise CommandFailed("CANNOT_SIMULATE", f"{where}{error}") from error


def lines_of(file: Path) -> Iterable[str]:
    """The lines of a file; CommandFailed when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed("CANNOT_SIMULATE", f"{file} cannot be read: {error}") from error


def _policies(names: str, mesh: "Settings", model: str | None) -> "dict[str, Policy]":
    """Policies by name, in the order they were named; "config" is the configuration's for ``model``."""
    from sluice.settings.batching import PRESETS, Policy

    known = {name: Policy.model_validate(name) for name in PRESETS}
    known["config"] = mesh.batcher.policy_of(model) if model else mesh.batcher.policy
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    for name in chosen or [""]:
        if name not in known:
            raise typer.BadParameter(f"no policy {name!r}; there are {', '.join(known)}")
    return {name: known[name] for name in chosen}
