"""The picture of a simulation: how TTFT and TPOT are spread under each policy, and what comes of it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .metrics import Report

NUM_POINTS = 400  # of a curve
SIZE_INCHES = (11, 7)
DPI = 110


class PlotError(RuntimeError):
    """There is no matplotlib, or the file cannot be written; the message says so."""


Curves = tuple[NDArray[np.float64], NDArray[np.float64]]  # TTFT and TPOT of requests, in seconds


def check_matplotlib() -> None:
    """PlotError naming the extra where matplotlib is missing."""
    try:
        import matplotlib as mpl  # noqa: F401, PLC0415 - loaded only where a plot is wanted
    except ImportError as error:
        raise PlotError("--plot needs matplotlib: pip install 'millstream[plot]'") from error


def write_plot(path: Path, title: str, reports: Sequence[Report], curves: Sequence[Curves]) -> None:
    """Write a PNG, whatever the name ends with; PlotError."""
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - as above
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    (ttft, tpot), (goodput, hits) = figure.subplots(2, 2)
    figure.suptitle(title)
    for axes, name, index, target in (
        (ttft, "TTFT", 0, reports[0].ttft_target_ms),
        (tpot, "TPOT", 1, reports[0].tpot_target_ms),
    ):
        for report, seconds in zip(reports, curves, strict=True):
            _draw_curve(axes, report.policy, seconds[index])
        axes.axvline(target, color="0.6", linestyle=":")
        axes.set(xlabel=f"{name} (ms), target dotted", ylabel="share of requests", xscale="log", ylim=(0, 1.02))
        axes.legend()
    names = [report.policy for report in reports]
    _draw_bars(goodput, names, [report.goodput_per_s for report in reports], "goodput (requests a second)")
    _draw_bars(hits, names, [100 * report.hit_rate for report in reports], "hit rate (% of prompt tokens)")
    for index, report in enumerate(reports):
        if report.num_retractions:
            hits.annotate(
                f"{report.num_retractions} retractions", (index, 0), (0, 3), textcoords="offset points", ha="center"
            )
    try:
        figure.savefig(path, format="png", dpi=DPI)
    except OSError as error:
        raise PlotError(f"--plot {path}: {error.strerror or error}") from error


def _draw_curve(axes: Any, label: str, seconds: NDArray[np.float64]) -> None:
    """The share of requests at or under each time."""
    if not len(seconds):
        return
    shares = np.linspace(0, 1, min(NUM_POINTS, len(seconds)))
    axes.plot(1000 * np.maximum(np.quantile(seconds, shares), 1e-6), shares, label=label)


def _draw_bars(axes: Any, names: list[str], values: list[float], label: str) -> None:
    bars = axes.bar(names, values, color="tab:blue", width=0.6)
    axes.bar_label(bars, fmt="%.3g", padding=2)
    axes.set(ylabel=label)
    axes.margins(y=0.15)
