"""The reports of a simulation, as a table and as JSON lines."""

from collections.abc import Sequence

import msgspec

from .metrics import Report

MAX_LEVELS = 12  # priorities that the table shows
COLUMNS = (
    ("policy", lambda report: report.policy),
    ("TTFT ms p50", lambda report: _number(report.ttft_ms.p50)),
    ("p99", lambda report: _number(report.ttft_ms.p99)),
    ("TPOT ms p50", lambda report: _number(report.tpot_ms.p50)),
    ("p99", lambda report: _number(report.tpot_ms.p99)),
    ("ITL ms p99", lambda report: _number(report.itl_ms.p99)),
    ("queue ms p99", lambda report: _number(report.queue_ms.p99)),
    ("output tok/s", lambda report: _number(report.output_tokens_per_s)),
    ("goodput/s", lambda report: f"{report.goodput_per_s:.2f}"),
    ("good %", lambda report: f"{100 * report.goodput_share:.1f}"),
    ("hit %", lambda report: f"{100 * report.hit_rate:.1f}"),
    ("retractions", lambda report: str(report.num_retractions)),
    ("failed", lambda report: str(report.num_failed)),
)


def table(reports: Sequence[Report]) -> str:
    """One line for each policy; numbers on the right."""
    lines = _aligned([[name for name, _ in COLUMNS], *([cell(report) for _, cell in COLUMNS] for report in reports)])
    levels = _some(sorted({level for report in reports for level in report.ttft_ms_by_priority}))
    if levels:
        header = ["TTFT ms p50 by priority", *map(str, levels)]
        lines += ["", *_aligned([header, *([each.policy, *_medians(each, levels)] for each in reports)])]
    lines += [
        f"{report.policy}: first failure: {report.first_error}" for report in reports if report.first_error is not None
    ]
    return "\n".join(lines)


def json_lines(reports: Sequence[Report]) -> str:
    """One object a line."""
    return "\n".join(msgspec.json.encode(report).decode() for report in reports)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]


def _some(levels: list[int]) -> list[int]:
    """All, or the ends of many."""
    half = MAX_LEVELS // 2
    return levels if len(levels) <= MAX_LEVELS else [*levels[:half], *levels[-half:]]


def _medians(report: Report, levels: list[int]) -> list[str]:
    return [_number(report.ttft_ms_by_priority[level].p50) for level in levels]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
