"""What decides which version of an operator runs: "auto" takes the C version on CPU where it can be built, else torch.

`configure` is called once by the process that owns the tensors, before the first operator. Without a cache directory,
C versions are built anew by each process.
"""

import ctypes
import dataclasses
import logging
import subprocess
import tempfile
from pathlib import Path
from typing import Literal

import torch

from .compiler import BuildError, build

Backend = Literal["auto", "torch"]
SAMPLER = "cpu_sampling.c"
NATIVE_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Choice:
    backend: Backend = "auto"
    cache_dir: Path | None = None
    libraries: dict[str, ctypes.CDLL | None] = dataclasses.field(default_factory=dict)


_choice = _Choice()


def configure(backend: Backend = "auto", cache_dir: Path | None = None) -> None:
    """Choose the backend, and the directory that keeps compiled code between starts (made with mode 0700)."""
    _choice.cache_dir = cache_dir
    _choice.libraries.clear()
    set_backend(backend)


def set_backend(backend: Backend) -> None:
    """Choose the backend alone: "torch" runs the reference of every operator."""
    if backend not in {"auto", "torch"}:
        raise ValueError(f"unknown kernel backend {backend!r}: known are auto, torch")
    _choice.backend = backend


def load_library(source_name: str) -> ctypes.CDLL | None:
    """The built C source of this folder; None with the backend "torch", or where it cannot be built (logged once)."""
    if _choice.backend == "torch":
        return None
    if source_name not in _choice.libraries:
        _choice.libraries[source_name] = _build_and_load(Path(__file__).with_name(source_name))
    return _choice.libraries[source_name]


def operators_for(x: torch.Tensor) -> tuple[ctypes.CDLL, str] | None:
    """The C operators and the suffix of their names for x's type; None where torch's versions must run."""
    suffix = NATIVE_SUFFIXES.get(x.dtype)
    if suffix is None or x.device.type != "cpu":
        return None
    library = load_library(f"cpu_operators_{suffix}.c")
    return None if library is None else (library, suffix)


def prepare(dtype: torch.dtype) -> None:
    """Build what a model of this type needs on CPU, ahead of its first use: seconds on a machine's first start."""
    operators_for(torch.empty(0, dtype=dtype))
    load_library(SAMPLER)


def _build_and_load(source: Path) -> ctypes.CDLL | None:
    try:
        if _choice.cache_dir is not None:
            return ctypes.CDLL(str(build(source, _choice.cache_dir)))
        with tempfile.TemporaryDirectory(prefix="millstream-kernels-") as directory:
            return ctypes.CDLL(str(build(source, Path(directory))))
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        logger.warning("%s is not built, the torch versions run instead: %s", source.name, error)
        return None
