"""Synthetic traces: who asks, when, for what, all from one seed.

A trace is a list of conversations; with one turn each, of plain requests. A turn's prompt is the whole conversation so
far (prompt and output of the turn before) and new tokens. A first prompt begins with what it shares with others:

    --shared-prefix      one of `num_prefixes` documents, Zipf popularity (like retrieval-augmented generation)
    --tree-depth         a path from the root of a tree to a leaf, a text for each node (like branching agents)
"""

from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from .distribution import Int64Array, Lengths, arrival_times, zipf_choices
from .token_stream import Segment, prompt_ids

MIN_CAP = 16  # tokens: the smallest max_new_tokens that a client asks for
BATCH = 4096  # conversations are drawn so many at a time


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What `millstream simulate` is asked to generate; times in seconds, lengths in tokens."""

    num_requests: int
    arrival: str = "poisson"
    request_rate: float = 1.0  # conversations a second
    arrival_cv: float = 1.0
    num_users: int = 8  # of the closed loop
    think_seconds: float = 0.0
    input_len: Lengths
    output_len: Lengths
    max_new_tokens: int | None = None
    ignore_eos: bool = False
    shared_prefix: int = 0
    num_prefixes: int = 16
    prefix_zipf: float = 1.0
    turns: Lengths = Lengths("fixed", (1,))
    tree_depth: int = 0
    tree_branching: int = 4
    tree_node_len: int = 256
    priority_levels: int = 1
    context_len: int
    seed: int = 0


class SimulatedRequest(msgspec.Struct, kw_only=True):
    """One request of a trace. The scheduler learns the prompt and `max_new_tokens`; the worker knows the output.

    `arrival` is None where the request is sent when something ends: `after`, the turn before, and `think_seconds`
    later; or, without one, whenever a user of the closed loop is free.
    """

    prompt: tuple[Segment, ...] | bytes
    input_len: int
    output_len: int
    max_new_tokens: int
    ignore_eos: bool = False
    arrival: float | None = None
    after: int | None = None
    think_seconds: float = 0.0
    output_stream: int = 0
    output_ids: bytes = b""  # of a recorded request, in place of the stream
    priority: int | None = None
    routing_key: str | None = None

    def input_ids(self, vocab_size: int) -> bytes:
        """The prompt as packed int32."""
        return self.prompt if isinstance(self.prompt, bytes) else prompt_ids(self.prompt, vocab_size)


class Trace(msgspec.Struct):
    """Requests, each after the one that it follows. `num_users` None: an open loop, every first turn has its arrival."""

    requests: list[SimulatedRequest]
    num_users: int | None = None


def make_trace(workload: Workload) -> Trace:
    """Draw the requests of a workload: `num_requests`, of which the last conversation may lack turns."""
    rng = np.random.default_rng(workload.seed)
    requests: list[SimulatedRequest] = []
    writer = _Writer(workload, rng)
    while len(requests) < workload.num_requests:
        writer.add_conversation(requests)
    _set_arrivals(workload, requests, rng)
    if workload.priority_levels > 1:
        for request, level in zip(requests, rng.integers(workload.priority_levels, size=len(requests)), strict=True):
            request.priority = int(level)
    return Trace(requests, workload.num_users if workload.arrival == "closed" else None)


class _Writer:
    """Writes conversations, a batch of draws at a time."""

    def __init__(self, workload: Workload, rng: np.random.Generator) -> None:
        self._workload = workload
        self._rng = rng
        self._num_streams = workload.num_prefixes + _num_tree_nodes(workload)
        self._draws: dict[str, Iterator[int]] = {}
        self._longest = workload.max_new_tokens or _longest_output(workload)

    def add_conversation(self, requests: list[SimulatedRequest]) -> None:
        """One conversation, of as many turns as fit into the context and into `num_requests`."""
        workload = self._workload
        first, key = self._shared_segments()
        prompt = first
        for turn in range(self._next("turns", workload.turns)):
            new = Segment(self._new_stream(), self._next("input_len", workload.input_len))
            prompt = (*prompt, new)
            input_len = sum(segment.length for segment in prompt)
            output_len = min(self._next("output_len", workload.output_len), self._longest)
            if input_len + output_len > workload.context_len and turn:
                break
            request = SimulatedRequest(
                prompt=prompt,
                input_len=input_len,
                output_len=output_len,
                max_new_tokens=self._max_new_tokens(output_len),
                ignore_eos=workload.ignore_eos,
                after=len(requests) - 1 if turn else None,
                think_seconds=self._rng.exponential(workload.think_seconds) if workload.think_seconds else 0.0,
                output_stream=self._new_stream(),
                routing_key=key,
            )
            requests.append(request)
            if len(requests) == workload.num_requests:
                break
            prompt = (*prompt, Segment(request.output_stream, output_len))

    def _max_new_tokens(self, output_len: int) -> int:
        """What a client asks for whose output will have this length: it has an idea of it, and no more."""
        if self._workload.ignore_eos:
            return output_len
        return self._workload.max_new_tokens or max(MIN_CAP, 1 << output_len.bit_length())

    def _shared_segments(self) -> tuple[tuple[Segment, ...], str | None]:
        """What the first prompt shares with others, and the routing key of those who share it."""
        workload = self._workload
        if workload.tree_depth:
            path = self._tree_path()
            return tuple(Segment(node, workload.tree_node_len) for node in path), f"node-{path[-1]}"
        if workload.shared_prefix:
            prefix = self._next_prefix()
            return (Segment(prefix, workload.shared_prefix),), f"prefix-{prefix}"
        return (), None

    def _tree_path(self) -> list[int]:
        """Streams of the nodes from the root to a leaf; the tree's nodes are numbered level by level."""
        workload = self._workload
        path, first_of_level, index = [], workload.num_prefixes, 0
        for level in range(workload.tree_depth):
            path.append(first_of_level + index)
            first_of_level += workload.tree_branching**level
            index = index * workload.tree_branching + int(self._rng.integers(workload.tree_branching))
        return path

    def _new_stream(self) -> int:
        self._num_streams += 1
        return self._num_streams

    def _next(self, name: str, lengths: Lengths) -> int:
        return self._draw(name, lambda: lengths.sample(self._rng, BATCH))

    def _next_prefix(self) -> int:
        workload = self._workload
        return self._draw("prefix", lambda: zipf_choices(workload.num_prefixes, workload.prefix_zipf, BATCH, self._rng))

    def _draw(self, name: str, sample: Callable[[], Int64Array]) -> int:
        drawn = next(self._draws.get(name, iter(())), None)
        if drawn is None:
            self._draws[name] = iter(sample().tolist())
            drawn = next(self._draws[name])
        return drawn


def _num_tree_nodes(workload: Workload) -> int:
    return sum(workload.tree_branching**level for level in range(workload.tree_depth))


def _longest_output(workload: Workload) -> int:
    """Where the tail of the outputs is cut: the next power of two over four times the mean."""
    lengths = workload.output_len
    mean = sum(lengths.parameters) / 2 if lengths.kind == "uniform" else lengths.parameters[0]
    longest = lengths.parameters[-1] if lengths.kind in {"fixed", "uniform"} else 4 * mean
    return 1 << (int(longest) - 1).bit_length()


def _set_arrivals(workload: Workload, requests: list[SimulatedRequest], rng: np.random.Generator) -> None:
    if workload.arrival == "closed":
        return
    firsts = [request for request in requests if request.after is None]
    times = arrival_times(workload.arrival, workload.request_rate, workload.arrival_cv, len(firsts), rng)
    for request, arrival in zip(firsts, times.tolist(), strict=True):
        request.arrival = arrival
