"""The requests of an HTTP call and their answers: n of each, with their ids and the names by which clients find them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..common.logprobs import LogprobReq
from ..common.messages import child_rid
from ..common.sampling_params import SamplingParams
from .access import Caller
from .api_error import bad_request
from .call import Call
from .req_state import ReqState


class GenerateReq(msgspec.Struct, kw_only=True):
    """One request as a handler asks for it; `label` is the client's own id."""

    input_ids: list[int]
    sampling_params: SamplingParams
    label: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    routing_key: str | None = None
    logprobs: LogprobReq | None = None
    grammar: str | None = None
    pooling: str | None = None


class Family(NamedTuple):
    """A request, and what waits for each of its answers. `rid` goes to the scheduler, which knows the answers by theirs."""

    rid: str
    request: GenerateReq
    reqs: list[ReqState]


def new_families(
    call: Call, requests: Sequence[GenerateReq], special_token_ids: frozenset[int], *, stream: bool
) -> list[Family]:
    """One for each request; answer i to prompt p has the index n p + i where all ask for n.

    A rid is the client's label, the call's unique id, and the index in a batch, so that any of these finds the request
    in every process's log.
    """
    families, index = [], 0
    for position, request in enumerate(requests):
        n = request.sampling_params.n
        parts = [request.label, call.request_id, str(position) if len(requests) > 1 else None]
        rid = "-".join(part for part in parts if part)
        reqs = []
        for number in range(n):
            label = request.label and child_rid(request.label, number, n)
            prompt_len = len(request.input_ids)
            req = ReqState(call, child_rid(rid, number, n), label, index=index, prompt_len=prompt_len, stream=stream)
            req.names |= {name for name in (rid, request.label) if name}
            req.counts_prompt = number == 0
            if request.logprobs is not None:
                req.wanted_logprobs, req.prompt_ids = request.logprobs, request.input_ids
                req.hidden_ids = special_token_ids if request.sampling_params.skip_special_tokens else frozenset()
            reqs.append(req)
            index += 1
        families.append(Family(rid, request, reqs))
    return families


def names_of(call: Call, families: Sequence[Family]) -> dict[str, list[str]]:
    """Each name, and the rids that it stands for. APIError where a client's id names two requests."""
    rids = [req.rid for family in families for req in family.reqs]
    labelled = [(family.request.label, [req.rid for req in family.reqs]) for family in families]
    labelled += [(req.label, [req.rid]) for family in families if len(family.reqs) > 1 for req in family.reqs]
    named = [(label, found) for label, found in labelled if label is not None]
    names = dict(named)
    if len(names) != len(named):
        raise _duplicate_id()
    return {call.request_id: rids} | ({call.label: rids} if call.label is not None else {}) | names


class NamesInFlight:
    """The ids by which clients find their requests. Each tenant has a name space of its own."""

    def __init__(self) -> None:
        self._rids_of: defaultdict[str | None, dict[str, list[str]]] = defaultdict(dict)  # tenant -> name -> rids

    def take(self, tenant: str | None, rids_of: Mapping[str, list[str]]) -> None:
        """Enter the names of a call, or raise the 400 where one of them is in flight already."""
        mine = self._rids_of[tenant]
        if not mine.keys().isdisjoint(rids_of):
            raise _duplicate_id()
        mine.update(rids_of)

    def free(self, tenant: str | None, names: Iterable[str]) -> None:
        """A call needs its names no more."""
        for name in names:
            del self._rids_of[tenant][name]

    def find(self, name: str, caller: Caller) -> list[str]:
        """The rids that a name stands for, or that of a response: to the admin in all name spaces, else in the caller's."""
        tenants = list(self._rids_of) if caller.is_admin else [caller.tenant]
        spaces = [self._rids_of[tenant] for tenant in tenants]
        return [rid for names in spaces for rid in names.get(name) or names.get(call_id_of(name), [])]


def call_id_of(name: str) -> str:
    """The id of a call, from that of its response."""
    return re.sub("^(chatcmpl-|cmpl-|msg_|resp_)", "", name)


def _duplicate_id() -> Exception:
    """The 400 for an id that a client uses twice."""
    return bad_request("A request with this id is in flight already; ids must differ.", "rid", "duplicate_request_id")
