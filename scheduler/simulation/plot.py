"""The picture of a simulation: how TTFT and TPOT are spread under each policy, and what comes of it."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .metrics import Report

NUM_POINTS = 400  # of a curve
SIZE_INCHES = (11, 7)
DPI = 110
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "x")


class PlotError(RuntimeError):
    """There is no matplotlib, or the file cannot be written, or is no PNG; the message says so."""


Curves = tuple[NDArray[np.float64], NDArray[np.float64]]  # TTFT and TPOT of requests, in seconds


def check_matplotlib() -> None:
    """PlotError naming the extra where matplotlib is missing."""
    try:
        import matplotlib as mpl  # noqa: F401, PLC0415 - loaded only where a plot is wanted
    except ImportError as error:
        raise PlotError("--plot needs matplotlib: pip install 'millstream[plot]'") from error


def check_plot_path(name: str) -> None:
    """PlotError where a PNG cannot be written there: better said before a simulation than after it."""
    path = Path(name)
    if path.suffix.lower() != ".png":
        raise PlotError(f"--plot {name}: the name must end with .png")
    if not path.parent.is_dir():
        raise PlotError(f"--plot {name}: No such file or directory: {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PlotError(f"--plot {name}: it cannot be written")


def write_plot(path: Path, title: str, reports: Sequence[Report], curves: Sequence[Curves]) -> None:
    """Write a PNG; PlotError. A policy has one colour in all four pictures."""
    check_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - as above
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    (ttft, tpot), (goodput, hits) = figure.subplots(2, 2)
    figure.suptitle(title)
    names = [report.policy for report in reports]
    for axes, name, index, target in (
        (ttft, "TTFT", 0, reports[0].ttft_target_ms),
        (tpot, "TPOT", 1, reports[0].tpot_target_ms),
    ):
        _draw_curves(axes, names, [1000 * np.maximum(seconds[index], 1e-6) for seconds in curves], target)
        axes.set(xlabel=f"{name} (ms), target dotted", ylabel="share of requests", ylim=(0, 1.02))
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


def _draw_curves(axes: Any, names: list[str], curves: Sequence[NDArray[np.float64]], target: float) -> None:
    """The share of requests at or under each time; later curves are thinner, so that equal ones are all seen."""
    for index, (name, milliseconds) in enumerate(zip(names, curves, strict=True)):
        if not len(milliseconds):
            continue
        shares = np.linspace(0, 1, min(NUM_POINTS, len(milliseconds)))
        style = {"linestyle": LINE_STYLES[index % len(LINE_STYLES)], "marker": MARKERS[index % len(MARKERS)]}
        width = 1.2 + 0.7 * (len(names) - 1 - index)
        marks = (index * 0.03, 0.2)  # where along the curve
        axes.plot(np.quantile(milliseconds, shares), shares, label=name, linewidth=width, markevery=marks, **style)
    axes.axvline(target, color="0.6", linestyle=":")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    _scale_times(axes, [*(each for each in curves if len(each)), np.array([target])])


def _scale_times(axes: Any, shown: Sequence[NDArray[np.float64]]) -> None:
    """A logarithmic axis with few labels, or a plain one where there is less than a decade to show."""
    low, high = min(float(each.min()) for each in shown), max(float(each.max()) for each in shown)
    if high < 10 * low or low <= 0:
        return
    steps = (1.0, 2.0, 5.0) if high < 100 * low else (1.0, 3.0) if high < 1e4 * low else (1.0,)
    axes.set_xscale("log")
    axes.xaxis.get_major_locator().set_params(subs=steps, numticks=12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_formatter(lambda _, __: "")


def _draw_bars(axes: Any, names: list[str], values: list[float], label: str) -> None:
    bars = axes.bar(names, values, color=[f"C{index}" for index in range(len(names))], width=0.6)
    axes.bar_label(bars, fmt="%.3g", padding=2)
    axes.tick_params(axis="x", labelsize=9)
    axes.set(ylabel=label, ylim=(0, 1.15 * max(values) or 1.0))
