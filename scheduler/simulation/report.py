"""The reports of a simulation, as a table and as JSON lines."""

from collections.abc import Sequence

import msgspec

from .metrics import Report

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
    rows = [[name for name, _ in COLUMNS], *([cell(report) for _, cell in COLUMNS] for report in reports)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = [
        "  ".join(cell.ljust(width) if not column else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
    lines += [
        f"{report.policy}: first failure: {report.first_error}" for report in reports if report.first_error is not None
    ]
    return "\n".join(lines)


def json_lines(reports: Sequence[Report]) -> str:
    """One object a line."""
    return "\n".join(msgspec.json.encode(report).decode() for report in reports)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
