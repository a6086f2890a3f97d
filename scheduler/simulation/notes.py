"""What a reader of a comparison should know: which policies had nothing to tell requests apart by, and which ran alike."""

from collections.abc import Sequence
from itertools import groupby

import msgspec

from .metrics import Report
from .workload import Trace

SHARING_POLICIES = ("lpm", "dfs-weight")


def notes(reports: Sequence[Report], trace: Trace) -> list[str]:
    """A line for each group of policies with the same figures, and why that may be."""
    figures = [(msgspec.json.encode(msgspec.structs.replace(report, policy="")), report.policy) for report in reports]
    groups = [[policy for _, policy in group] for _, group in groupby(sorted(figures), key=lambda each: each[0])]
    blind = {report.policy: why for report in reports if (why := _why_blind(report, trace)) is not None}
    told = []
    for group in (group for group in groups if len(group) > 1):
        reasons = [f"{policy}: {blind[policy]}" for policy in group if policy in blind]
        why = "; ".join(reasons) if len(reasons) >= len(group) - 1 else "their orders made no difference on this load"
        told.append(f"{', '.join(group)}: the same figures ({why})")
    return told


def _why_blind(report: Report, trace: Trace) -> str | None:
    """Why a policy can order requests no otherwise than fcfs; None where it can."""
    requests = trace.requests
    if report.policy == "lof" and len({request.max_new_tokens for request in requests}) == 1:
        return "every request has the same max_new_tokens"
    if report.policy == "routing-key" and not any(request.routing_key for request in requests):
        return "no request has a routing key"
    if report.policy in SHARING_POLICIES and not report.hit_rate:
        return "no prompt begins with what is cached"
    return None
