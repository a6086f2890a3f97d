"""How packed weights lie in memory: panels of columns (outputs), as wide as this machine's vectors ask for.

N output features, K input features, L float lanes of a vector, V = VECTORS, B panels of V * L outputs.
cpu_linear.h reads what is written here; nothing outside `kernels/` may rely on it.
"""

import ctypes

import torch

from .backend import NATIVE_SUFFIXES, find_function, is_reference_forced

VECTORS = 3


def vector_lanes(dtype: torch.dtype, device: torch.device) -> int | None:
    """Float lanes of the C code for activations of this type; None where there is none."""
    suffix = NATIVE_SUFFIXES.get(dtype)
    if suffix is None or device.type != "cpu" or is_reference_forced():
        return None
    address = find_function(f"cpu_linear_{suffix}.c", "num_lanes")
    return None if address is None else int(ctypes.CFUNCTYPE(ctypes.c_int)(address)())


def into_panels(x_NK: torch.Tensor, lanes: int, run: int) -> torch.Tensor:
    """[B, K / run, V, L, run]: a panel goes along K in runs of `run` adjacent inputs. Rows that are missing are 0."""
    num_rows, num_columns = x_NK.shape
    height = VECTORS * lanes
    num_panels = -(-num_rows // height)
    if num_rows % height:
        padded = x_NK.new_zeros((num_panels * height, num_columns))
        padded[:num_rows] = x_NK
        x_NK = padded
    panels = x_NK.view(num_panels, VECTORS, lanes, num_columns // run, run)
    return panels.permute(0, 3, 1, 2, 4)


def out_of_panels(panels: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[N, K], what `into_panels` was given."""
    num_panels, num_runs, vectors, lanes, run = panels.shape
    return panels.permute(0, 2, 3, 1, 4).reshape(num_panels * vectors * lanes, num_runs * run)[:num_rows]
