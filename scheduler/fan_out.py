"""n answers to one prompt: a request becomes n, its children, each with a seed of its own.

Child 0 computes the prompt; the others wait until its pages are in the tree (prefix_sharing.py) and compute the rest of
the last page. From there on each is a request like any other: it is budgeted, ends, is retracted and aborted alone.
"""

import hashlib
import struct

import msgspec

from ..common.messages import TokenizedGenerateReqInput, child_rid
from ..common.sampling_params import MAX_N


def children_of(message: TokenizedGenerateReqInput) -> list[TokenizedGenerateReqInput]:
    """The requests that a message stands for; itself where that is one, or where admission will refuse its n."""
    params = message.sampling_params
    if not 1 < params.n <= MAX_N or message.pooling is not None:
        return [message]
    return [
        msgspec.structs.replace(
            message,
            rid=child_rid(message.rid, index, params.n),
            sampling_params=msgspec.structs.replace(params, n=1, seed=child_seed(params.seed or 0, index)),
        )
        for index in range(params.n)
    ]


def child_seed(seed: int, index: int) -> int:
    """The seed of child `index`, in 64 bits: a fixed hash of both; child 0 keeps the seed.

    What does not fit in 64 bits is refused with child 0.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<Qq", seed % 2**64, index), digest_size=8).digest()
    return int(struct.unpack("<q", digest)[0])
