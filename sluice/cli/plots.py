"""Pictures, with matplotlib (the extra `plots`)."""

from pathlib import Path

from matplotlib.figure import Figure

from gateway.routing.learned.curves import Bands, Curve


def draw_curve(curve: Curve, bands: Bands, title: str, path: Path) -> None:
    """Quality against the share of prompts on the large model, with bands, as a PNG at ``path``."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.fill_between(
        100 * bands.share,
        bands.low,
        bands.high,
        alpha=0.2,
        linewidth=0,
        label="95 % of bootstrap draws",
    )
    axes.plot(100 * curve.share, curve.quality, label="this router, held out")
    ends = (float(curve.quality[0]), float(curve.quality[-1]))
    axes.plot((0, 100), ends, linestyle="--", color="grey", label="at random")
    axes.axhline(ends[1], linestyle=":", color="grey", linewidth=1, label="large model alone")
    axes.set(
        xlabel="prompts on the large model, %", ylabel="mean outcome", xlim=(0, 100), title=title
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
