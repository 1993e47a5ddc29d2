"""`sluice plan`: the number of workers that a load needs, by simulation."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import output, simulate
from cli.scenario import Objectives, Traffic, Workers, checked, lines_of

if TYPE_CHECKING:
    from simulator.arrivals import LengthMix
    from simulator.fleet import ProcessCost, Sizing
    from simulator.planner import JobPlan, TracePlan


@dataclass(frozen=True, kw_only=True)
class Documents:
    """A job of documents instead of traffic, and the processes that it needs."""

    documents: Annotated[
        int | None, typer.Option(min=1, help="Plan a job of so many documents instead.")
    ] = None
    hours: Annotated[float, typer.Option(min=0.001, help="Time that the job may take.")] = 24.0
    prompt_tokens: Annotated[
        str,
        typer.Option(
            metavar="LENGTHS", help="Length of a document: 900, or lognormal/900/0.6/4096."
        ),
    ] = "lognormal/500/0.7/4096"
    answer_tokens: Annotated[str, typer.Option(metavar="LENGTHS", help="Length of its answer.")] = (
        "lognormal/60/0.5/512"
    )
    zones: Annotated[
        int, typer.Option(min=1, help="Of a job's processes; of 2 and more one may fail.")
    ] = 3
    headroom: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of each process that stays free.")
    ] = 0.3
    process_costs: Annotated[
        Path | None,
        typer.Option(help="Results of `scripts/bench processes`, instead of the shipped costs."),
    ] = None

    def lengths(self) -> "LengthMix":
        """Of documents and their answers."""
        from simulator.arrivals import LengthMix, parse_lengths

        return LengthMix(
            checked(lambda: parse_lengths(self.prompt_tokens), "--prompt-tokens"),
            checked(lambda: parse_lengths(self.answer_tokens), "--answer-tokens"),
        )

    def sizing(self) -> "Sizing":
        """What stays free of each kind of process."""
        from simulator.fleet import Sizing

        return Sizing(self.headroom, self.zones)

    def costs(self) -> "dict[str, ProcessCost]":
        """What a request costs each process: of a file, else as shipped."""
        from simulator.fleet import SHIPPED, parse_costs

        path = self.process_costs
        return (
            dict(SHIPPED)
            if path is None
            else checked(lambda: parse_costs(lines_of(path)), str(path))
        )


def plan(
    *,
    traffic: Traffic,
    job: Documents,
    share: Annotated[
        float,
        typer.Option(min=0.01, max=1, help="Share of each class that must meet its SLO."),
    ] = 0.99,
    workers_max: Annotated[int, typer.Option(min=1, max=4096)] = 256,
    policy: Annotated[str, typer.Option(help="Policy of the batcher.")] = "continuous",
    workers: Workers,
    objectives: Objectives,
) -> None:
    """Compute how many workers are needed: for a trace under SLOs, or for a job of documents in a given time.

    A trace is simulated with more and fewer workers. A job is computed, and checked against a simulated sample.
    """
    from simulator.planner import plan_job, plan_trace

    setups = workers.setups(policy, traffic.model)
    if len(setups) != 1:
        raise typer.BadParameter(f"{policy!r} is more than one policy")
    (setup,) = setups.values()
    price = objectives.worker_hour_price
    if job.documents is None:
        found, slos = traffic.load(), objectives.slos()
        planned = checked(
            lambda: plan_trace(
                found, setup, slos, share=share, workers_max=workers_max, worker_hour_price=price
            )
        )
        output.show(asdict(planned), lambda: _show_trace(planned))
        return
    if traffic.trace is not None or traffic.arrivals:
        raise typer.BadParameter("give either --documents or traffic")
    computed = plan_job(
        job.documents,
        job.hours,
        job.lengths(),
        setup,
        seed=traffic.seed,
        sizing=job.sizing(),
        costs=job.costs(),
        cost_error=workers.cost_error(),
        worker_hour_price=price,
    )
    output.show(asdict(computed), lambda: _show_job(computed))


def _show_trace(planned: "TracePlan") -> None:
    shown = {f"{planned.workers} workers": planned.summary}
    if planned.one_less is not None:
        shown[f"{planned.workers - 1} workers"] = planned.one_less
    simulate.show(shown)
    print(f"\n{planned.workers} workers meet the SLOs")


def _show_job(job: "JobPlan") -> None:
    rows = [
        ("documents a second needed", f"{job.documents_per_s:.4g}"),
        ("documents a second of one worker, computed", f"{job.worker_documents_per_s:.4g}"),
        ("documents a second of one worker, simulated", f"{job.simulated_documents_per_s:.4g}"),
        ("computed against simulated", f"{job.shortcut_error:+.1%}"),
        ("worker hours", f"{job.worker_hours:.4g}"),
        ("cost", None if job.cost is None else f"{job.cost:.4g}"),
        ("workers, nothing to spare", job.workers),
    ]
    output.write_table((f"{job.documents} documents in {job.hours:g} h", ""), rows)
    print()
    kinds = [
        (
            *(kind.name, f"{kind.needed:.3g} +- {kind.error:.0%}"),
            *(kind.processes, f"{kind.low} to {kind.high}"),
        )
        for kind in job.fleet
    ]
    output.write_table(("process", "full ones needed", "in all zones", "by the error"), kinds)
