"""What the tokenizer manager knows of requests, those that have ended included: bounded, found by any of their names."""

from collections import OrderedDict

import msgspec

from ..common.text_messages import StrEnd
from .req_state import ReqState

MAX_REQUESTS = 1000


class ReqRecord(msgspec.Struct, frozen=True):
    """A request as its client saw it; times are the manager's clock, 0 for what has not happened."""

    rid: str
    label: str | None
    tenant: str | None
    call_id: str
    names: frozenset[str]
    arrival: float
    prompt_len: int
    first_output: float
    ended_at: float
    end: StrEnd | None


def record_of(req: ReqState) -> ReqRecord:
    """What is known now."""
    return ReqRecord(
        rid=req.rid,
        label=req.label,
        tenant=req.tenant,
        call_id=req.call_id,
        names=req.names,
        arrival=req.arrival,
        prompt_len=req.prompt_len,
        first_output=req.first_output,
        ended_at=req.ended_at,
        end=req.end,
    )


class RequestHistory:
    """The last requests that ended."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._records: OrderedDict[str, ReqRecord] = OrderedDict()  # by rid
        self._rids_of: dict[str, dict[str, None]] = {}  # name -> its rids, in order

    def __len__(self) -> int:
        return len(self._records)

    def add(self, req: ReqState) -> None:
        """A request has ended; the oldest one is forgotten."""
        record = record_of(req)
        self._records[req.rid] = record
        for name in record.names:
            self._rids_of.setdefault(name, {})[req.rid] = None
        if len(self._records) > self._max_requests:
            self._forget(self._records.popitem(last=False)[1])

    def find(self, name: str) -> list[ReqRecord]:
        """The requests of this name, a rid, a label or a call's id: several of a batch, or of calls with one label."""
        return [self._records[rid] for rid in self._rids_of.get(name, ())]

    def _forget(self, record: ReqRecord) -> None:
        for name in record.names:
            rids = self._rids_of.get(name, {})
            rids.pop(record.rid, None)
            if not rids:
                self._rids_of.pop(name, None)
