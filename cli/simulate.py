"""`sluice simulate`: compares policies of the batcher under a load, without a mesh."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli import output
from cli.scenario import Objectives, Traffic, Workers, checked

if TYPE_CHECKING:
    from simulator.results import ClassSummary, History, Slo, Summary
    from simulator.simulator import Setup
    from simulator.trace import Arrival


def simulate(
    *,
    traffic: Traffic,
    policies: Annotated[
        str, typer.Option(metavar="A,B,C", help="Named policies of the batcher to compare.")
    ] = "continuous",
    workers: Annotated[int, typer.Option(min=1, max=4096)] = 1,
    each: Workers,
    objectives: Objectives,
    until: Annotated[
        float | None,
        typer.Option(min=0.001, help="Stop then, seconds.  [default: when all has ended]"),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write load.png and queue.png there.")
    ] = None,
) -> None:
    """Run recorded or generated traffic through the batcher's own code in virtual time, and compare policies.

    Prints time to first token and latency per class, goodput under the SLOs, the longest wait, padding,
    utilization and cost.
    """
    from simulator.results import summarize
    from simulator.simulator import simulate as run

    if plot is not None:
        from simulator import plots as pictures

        checked(pictures.check, "--plot")
    found, slos = traffic.load(), objectives.slos()
    setups = each.setups(policies, traffic.model, workers, until)
    histories = checked(lambda: {name: run(found, setup) for name, setup in setups.items()})
    summaries = {
        name: summarize(history, slos, objectives.worker_hour_price)
        for name, history in histories.items()
    }
    plots = [] if plot is None else _plot(plot, found, setups, histories, slos)

    def write() -> None:
        show(summaries)
        for file in plots:
            print(f"wrote {file}")

    described = {name: asdict(summary) for name, summary in summaries.items()}
    output.show({"policies": described, "plots": plots}, write)


def show(summaries: "Mapping[str, Summary]") -> None:
    """Prints the summaries of several policies: a table by class, and one of the workers."""
    headers = (
        *("policy", "class", "arrived", "finished", "expired", "refused", "open"),
        *("ttft p50", "p95", "p99", "latency p50", "p95", "p99"),
        *("longest wait", "goodput/s", "in slo"),
    )
    rows = [_class_row(name, c) for name, summary in summaries.items() for c in summary.classes]
    output.write_table(headers, rows)
    print()
    totals = (
        *("policy", "workers", "seconds", "tokens/s", "goodput/s", "in slo"),
        *("padding", "rows/batch", "utilization", "slots used", "cost", "cost/M tokens"),
    )
    output.write_table(totals, [_total_row(name, s) for name, s in summaries.items()])


def _class_row(policy: str, c: "ClassSummary") -> tuple[object, ...]:
    times = (
        *(c.ttft_s.p50, c.ttft_s.p95, c.ttft_s.p99),
        *(c.latency_s.p50, c.latency_s.p95, c.latency_s.p99, c.longest_wait_s),
    )
    return (
        *(policy, c.priority_class, c.arrived, c.finished, c.expired, c.refused, c.open),
        *(None if value is None else f"{value:.3f}" for value in times),
        *(f"{c.goodput_per_s:.2f}", f"{c.within_slo:.1%}"),
    )


def _total_row(policy: str, s: "Summary") -> tuple[object, ...]:
    costs = (s.cost, s.cost_per_million_tokens)
    return (
        *(policy, s.workers, f"{s.seconds:.1f}", f"{s.tokens_per_s:.1f}"),
        *(f"{s.goodput_per_s:.2f}", f"{s.within_slo:.1%}", f"{s.padding_share:.1%}"),
        *(f"{s.rows_per_batch:.1f}", f"{s.utilization:.1%}", f"{s.occupancy:.1%}"),
        *(None if cost is None else f"{cost:.4g}" for cost in costs),
    )


def _plot(
    folder: Path,
    trace: "list[Arrival]",
    setups: "Mapping[str, Setup]",
    histories: "Mapping[str, History]",
    slos: "Mapping[str, Slo]",
) -> list[str]:
    from simulator import plots
    from simulator.planner import sweep

    folder.mkdir(parents=True, exist_ok=True)
    load, queue = folder / "load.png", folder / "queue.png"
    plots.plot_load({name: sweep(trace, setup, slos) for name, setup in setups.items()}, load)
    plots.plot_queue(histories, queue)
    return [str(load), str(queue)]
