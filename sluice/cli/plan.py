"""`sluice plan`: the number of workers that a load needs, by simulation."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli import options, output, scenario, simulate

if TYPE_CHECKING:
    from simulator.planner import JobPlan, TracePlan


def plan(
    trace: scenario.Trace = None,
    arrivals: scenario.Arrivals = None,
    seconds: scenario.Seconds = 60.0,
    documents: Annotated[
        int | None, typer.Option(min=1, help="Plan a job of so many documents instead.")
    ] = None,
    hours: Annotated[float, typer.Option(min=0.001, help="Time that the job may take.")] = 24.0,
    prompt_tokens: Annotated[
        str,
        typer.Option(
            metavar="LENGTHS", help="Length of a document: 900, or lognormal/900/0.6/4096."
        ),
    ] = "lognormal/500/0.7/4096",
    answer_tokens: Annotated[
        str, typer.Option(metavar="LENGTHS", help="Length of its answer.")
    ] = "lognormal/60/0.5/512",
    share: Annotated[
        float,
        typer.Option(min=0.01, max=1, help="Share of each class that must meet its SLO."),
    ] = 0.99,
    workers_max: Annotated[int, typer.Option(min=1, max=4096)] = 256,
    policy: Annotated[str, typer.Option(help="Policy of the batcher.")] = "continuous",
    seed: scenario.Seed = 1,
    model: scenario.Model = None,
    config: scenario.Config = None,
    cost: scenario.Cost = "large-cpu",
    engine: scenario.EngineKind = "continuous",
    slots: scenario.Slots = 32,
    prefill_tokens: scenario.PrefillTokens = 512,
    cache_tokens: scenario.CacheTokens = 0,
    preempts: scenario.Preempts = True,
    admission: scenario.Admission = True,
    slo: scenario.Slos = None,
    worker_hour_price: scenario.Price = None,
    zones: Annotated[
        int, typer.Option(min=1, help="Of a job's processes; of 2 and more one may fail.")
    ] = 3,
    headroom: Annotated[
        float, typer.Option(min=0, max=0.9, help="Share of each process that stays free.")
    ] = 0.3,
    process_costs: Annotated[
        Path | None,
        typer.Option(help="Results of `scripts/bench processes`, instead of the shipped costs."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Compute how many workers are needed: for a trace under SLOs, or for a job of documents in a given time.

    A trace is simulated with more and fewer workers. A job is computed, and checked against a simulated sample.
    """
    from simulator.fleet import Sizing
    from simulator.planner import plan_job, plan_trace
    from simulator.results import parse_slos

    mesh = scenario.load_settings(config)
    chosen = scenario.load_policies(policy, mesh, model)
    if len(chosen) != 1:
        raise typer.BadParameter(f"{policy!r} is more than one policy")
    limits = scenario.limits(slots, prefill_tokens, cache_tokens, preempts, mesh, model)
    setup = scenario.setup(
        chosen[policy.strip()], mesh, cost=cost, engine=engine, limits=limits, admission=admission
    )
    if documents is not None:
        if trace is not None or arrivals:
            raise typer.BadParameter("give either --documents or traffic")
        mix = scenario.load_mix(prompt_tokens, answer_tokens)
        job = plan_job(
            documents,
            hours,
            mix,
            setup,
            seed=seed,
            sizing=Sizing(headroom, zones),
            costs=scenario.load_process_costs(process_costs),
            cost_error=scenario.cost_error(cost),
            worker_hour_price=worker_hour_price,
        )
        _write_job(job, as_json)
        return
    found = scenario.load_trace(trace, arrivals, seconds, seed, model)
    slos = scenario.checked(lambda: parse_slos(slo or ()), "--slo")
    planned = scenario.checked(
        lambda: plan_trace(
            found,
            setup,
            slos,
            share=share,
            workers_max=workers_max,
            worker_hour_price=worker_hour_price,
        )
    )
    _write_trace(planned, as_json)


def _write_trace(planned: "TracePlan", as_json: bool) -> None:
    if as_json:
        output.write_json(asdict(planned))
        return
    shown = {f"{planned.workers} workers": planned.summary}
    if planned.one_less is not None:
        shown[f"{planned.workers - 1} workers"] = planned.one_less
    simulate.show(shown)
    print(f"\n{planned.workers} workers meet the SLOs")


def _write_job(job: "JobPlan", as_json: bool) -> None:
    if as_json:
        output.write_json(asdict(job))
        return
    rows = [
        ("documents a second needed", f"{job.documents_per_s:.4g}"),
        ("documents a second of one worker, computed", f"{job.worker_documents_per_s:.4g}"),
        ("documents a second of one worker, simulated", f"{job.simulated_documents_per_s:.4g}"),
        ("computed against simulated", f"{job.shortcut_error:+.1%}"),
        ("worker hours", f"{job.worker_hours:.4g}"),
        ("cost", "-" if job.cost is None else f"{job.cost:.4g}"),
        ("workers, nothing to spare", str(job.workers)),
    ]
    output.write_table((f"{job.documents} documents in {job.hours:g} h", ""), rows)
    print()
    kinds = [
        (
            kind.name,
            f"{kind.needed:.3g} +- {kind.error:.0%}",
            f"{kind.processes}",
            f"{kind.low} to {kind.high}",
        )
        for kind in job.fleet
    ]
    output.write_table(("process", "full ones needed", "in all zones", "by the error"), kinds)
