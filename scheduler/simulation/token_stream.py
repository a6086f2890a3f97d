"""Token ids of simulated prompts and outputs: cheap, deterministic, and the same wherever a text is the same.

A stream is an endless text known by its number; a token is a hash (splitmix64, Steele and others 2014) of the stream
and the position in it. A prompt is a list of segments of streams, so that two prompts share exactly the prefix that
their segments share, and an output may go on in the prompt of the next turn.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]
Int32Array = NDArray[np.int32]

STREAM_BITS = np.uint64(32)


class Segment(NamedTuple):
    """Tokens 0 .. length-1 of a stream."""

    stream: int
    length: int


def token_ids(streams: UInt64Array | np.uint64, positions: UInt64Array, vocab_size: int) -> Int32Array:
    """The token of each (stream, position), in 0 .. vocab_size-1; the arguments broadcast."""
    state = (streams << STREAM_BITS) + positions
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((state >> np.uint64(16)) % np.uint64(vocab_size)).astype(np.int32)


def prompt_ids(segments: Sequence[Segment], vocab_size: int) -> bytes:
    """The segments one after another, as packed int32."""
    streams = np.array([segment.stream for segment in segments], np.uint64)
    lengths = np.array([segment.length for segment in segments], np.int64)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum(), dtype=np.int64) - np.repeat(starts, lengths)
    return token_ids(np.repeat(streams, lengths), positions.astype(np.uint64), vocab_size).tobytes()
