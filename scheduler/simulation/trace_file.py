"""Traces from files: a recorded schedule, or JSON lines of arrivals and lengths.

    {"arrival": 0.25, "input_length": 900, "output_length": 120}            seconds from any start
    {"timestamp": 250, "input_length": 900, "output_length": 120, "hash_ids": [46, 47]}

`timestamp`, in milliseconds, stands for `arrival` (the format of the Mooncake traces). `hash_ids` name the blocks of the
prompt: two prompts share the blocks that both begin with. Other fields are ignored.
"""

from pathlib import Path

import msgspec

from ...common.messages import TokenizedGenerateReqInput, pack_int32, unpack_int32
from ...common.text_messages import BatchTokenIDOutput, TextEnded
from ..recording.recording import RecordingError, read_recording
from .distribution import LONGEST
from .token_stream import Segment
from .workload import SimulatedRequest, Trace

HASH_STREAMS = 2**30  # streams of blocks begin here, above those of requests
MAX_HASH_ID = 2**31 - 1
FIRST_LINE_BYTES = 4096


class TraceError(ValueError):
    """The file is no trace; the message names file and line."""


class _Line(msgspec.Struct):
    input_length: int
    output_length: int
    arrival: float | None = None
    timestamp: float | None = None
    hash_ids: list[int] | None = None


def read_trace(path: Path, *, vocab_size: int, max_new_tokens: int | None, ignore_eos: bool, block_len: int) -> Trace:
    """A recording or JSON lines, told apart by the first line; times begin at 0. TraceError.

    A recorded request keeps the `max_new_tokens` that it asked for; for others it is the argument, or the longest
    output of the trace. With `ignore_eos` every request asks for exactly its output.
    """
    requests = _read_recording(path, vocab_size) if is_recording(path) else _read_lines(path, block_len)
    if not requests:
        raise TraceError(f"{path} has no request with an output")
    longest = max(request.output_len for request in requests)
    for request in requests:
        cap = request.max_new_tokens or max_new_tokens or longest
        request.output_len = min(request.output_len, cap)
        request.ignore_eos = request.ignore_eos or ignore_eos
        request.max_new_tokens = request.output_len if request.ignore_eos else cap
    requests.sort(key=lambda request: request.arrival or 0.0)
    start = requests[0].arrival or 0.0
    for request in requests:
        request.arrival = (request.arrival or 0.0) - start
    return Trace(requests)


def is_recording(path: Path) -> bool:
    """Whether the first line is a recording's header; recordings alone may be packed."""
    try:
        with path.open("rb") as file:
            return path.name.endswith(".gz") or b'"format"' in file.readline(FIRST_LINE_BYTES)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def _read_lines(path: Path, block_len: int) -> list[SimulatedRequest]:
    decoder = msgspec.json.Decoder(_Line)
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            requests.append(_request_of(decoder.decode(line), number, block_len))
        except (msgspec.MsgspecError, ValueError) as error:
            raise TraceError(f"{path} line {number}: {error}") from error
    return requests


def _request_of(line: _Line, number: int, block_len: int) -> SimulatedRequest:
    if not (1 <= line.input_length <= LONGEST and 1 <= line.output_length <= LONGEST):
        raise ValueError(f"input_length and output_length must be from 1 to {LONGEST}")
    arrival = line.timestamp / 1000 if line.arrival is None and line.timestamp is not None else line.arrival
    if arrival is None or not abs(arrival) < 1e12:
        raise ValueError("arrival (seconds) or timestamp (milliseconds) must be given, as a finite number")
    prompt, rest = [], line.input_length
    for hash_id in line.hash_ids or ():
        if not 0 <= hash_id <= MAX_HASH_ID:
            raise ValueError(f"hash_ids must be from 0 to {MAX_HASH_ID}")
        if rest > 0:
            prompt.append(Segment(HASH_STREAMS + hash_id, min(block_len, rest)))
            rest -= block_len
    if rest > 0:
        prompt.append(Segment(2 * number, rest))
    return SimulatedRequest(
        prompt=tuple(prompt),
        input_len=line.input_length,
        output_len=line.output_length,
        max_new_tokens=0,
        arrival=arrival,
        output_stream=2 * number + 1,
    )


def _read_recording(path: Path, vocab_size: int) -> list[SimulatedRequest]:
    """The requests that gave at least one token, with the tokens that they gave."""
    asked: dict[str, TokenizedGenerateReqInput] = {}
    outputs: dict[str, list[int]] = {}
    try:
        for entry in read_recording(path):
            message = entry.message
            if isinstance(message, TokenizedGenerateReqInput):
                asked[message.rid] = message
                outputs[message.rid] = []
            elif isinstance(message, BatchTokenIDOutput):
                _take_tokens(message, outputs)
            elif isinstance(message, TextEnded) and message.rid in outputs:
                del outputs[message.rid][message.num_tokens :]
    except RecordingError as error:
        raise TraceError(str(error)) from error
    requests = [_recorded_request(asked[rid], output_ids) for rid, output_ids in outputs.items() if output_ids]
    largest = max((max(unpack_int32(request.prompt), default=0) for request in requests), default=0)  # type: ignore[arg-type]
    if largest >= vocab_size:
        raise TraceError(f"{path} has the token {largest}, and the cost model a vocabulary of {vocab_size}")
    return requests


def _take_tokens(output: BatchTokenIDOutput, outputs: dict[str, list[int]]) -> None:
    token_ids, start = unpack_int32(output.token_ids), 0
    for rid, count in zip(output.rids, unpack_int32(output.num_tokens), strict=True):
        if rid in outputs:
            outputs[rid] += token_ids[start : start + count]
        start += count


def _recorded_request(message: TokenizedGenerateReqInput, output_ids: list[int]) -> SimulatedRequest:
    return SimulatedRequest(
        prompt=message.input_ids,
        input_len=len(message.input_ids) // 4,
        output_len=len(output_ids),
        max_new_tokens=message.sampling_params.max_new_tokens or 0,
        ignore_eos=message.sampling_params.ignore_eos,
        arrival=message.arrival,
        output_ids=pack_int32(output_ids),
        priority=message.priority,
        routing_key=message.routing_key,
    )
