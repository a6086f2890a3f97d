"""Calls of the C operators: signatures, and the checks of what C takes on trust (types, strides)."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from .backend import SAMPLER, load_library, operators_for

POINTER, INT64, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float

SIGNATURES: dict[str, tuple[type, ...]] = {
    "rms_norm": (POINTER, POINTER, POINTER, INT, INT64, INT64, FLOAT, INT),
    "add_rms_norm": (POINTER, POINTER, POINTER, POINTER, INT, INT64, INT64, FLOAT, INT),
    "silu_and_mul": (POINTER, POINTER, INT64, INT64, INT),
    "gelu_tanh_and_mul": (POINTER, POINTER, INT64, INT64, INT),
    "rotary_and_store": (POINTER,),
    "paged_attention": (POINTER,),
}

Operator = Callable[..., int]


def find_operator(name: str, x: torch.Tensor) -> Operator | None:
    """The C version of an operator for x's device and type; None where torch's must run."""
    found = operators_for(x)
    if found is None:
        return None
    library, suffix = found
    function: Any = getattr(library, f"{name}_{suffix}")
    if function.argtypes is None:
        function.argtypes = SIGNATURES[name]
        function.restype = INT
    operator: Operator = function
    return operator


def find_sampler(logits: torch.Tensor) -> Operator | None:
    """The C version of `sample`; None where torch's must run."""
    library = load_library(SAMPLER) if logits.device.type == "cpu" else None
    if library is None:
        return None
    library.sample.argtypes = (POINTER,)
    operator: Operator = library.sample
    return operator


def are_heads_adjacent(x_THD: torch.Tensor) -> bool:
    """Whether a token's heads lie behind each other; tokens may be apart."""
    return x_THD.stride()[1:] == (x_THD.shape[2], 1)


def as_int32(x: torch.Tensor) -> torch.Tensor:
    """Contiguous int32, copied only where it is not already."""
    return x.to(torch.int32).contiguous()
