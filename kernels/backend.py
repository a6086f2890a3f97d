"""Which versions of operators may run ("torch": the references alone), and the C code that was built for them.

`configure` is called once by the process that owns the tensors, before the first operator. Without a cache directory,
C versions are built anew by each process.
"""

import ctypes
import dataclasses
import logging
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from .compiler import BuildError, build

Backend = Literal["auto", "torch"]
TYPED_SOURCES = ("cpu_operators", "cpu_linear")
SOURCES = (
    "cpu_graph.c",
    "cpu_sampling.c",
    "cpu_logits.c",
    "cpu_logprobs.c",
    "cpu_rotary_tables.c",
    "collectives.c",
)
NATIVE_SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Choice:
    backend: Backend = "auto"
    cache_dir: Path | None = None
    libraries: dict[str, ctypes.CDLL | None] = dataclasses.field(default_factory=dict)
    functions: dict[tuple[str, str], int | None] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)


_choice = _Choice()


def configure(backend: Backend = "auto", cache_dir: Path | None = None) -> None:
    """Choose the backend, and the directory that keeps compiled code between starts (made with mode 0700)."""
    _choice.cache_dir = cache_dir
    _choice.libraries.clear()
    _choice.functions.clear()
    _choice.errors.clear()
    set_backend(backend)


def set_backend(backend: Backend) -> None:
    """Choose the backend alone: "torch" runs the reference of every operator."""
    if backend not in {"auto", "torch"}:
        raise ValueError(f"unknown kernel backend {backend!r}: known are auto, torch")
    _choice.backend = backend


def is_reference_forced() -> bool:
    """Whether only the torch references may run."""
    return _choice.backend == "torch"


def load_library(source_name: str) -> ctypes.CDLL | None:
    """The built C source of this folder; None where it cannot be built (logged once, see `build_error`)."""
    if source_name not in _choice.libraries:
        _choice.libraries[source_name] = _build_and_load(Path(__file__).with_name(source_name))
    return _choice.libraries[source_name]


def build_error(source_name: str) -> str:
    """Why a C source could not be built; empty where it was, or has not been tried."""
    return _choice.errors.get(source_name, "")


def find_function(source_name: str, symbol: str) -> int | None:
    """The address of a C function; None where its source cannot be built."""
    key = (source_name, symbol)
    if key not in _choice.functions:
        library = load_library(source_name)
        found = None if library is None else ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value
        _choice.functions[key] = found
    return _choice.functions[key]


def function_name(address: int) -> str:
    """The symbol of a C function that was found before."""
    names = (symbol for (_, symbol), found in _choice.functions.items() if found == address)
    return next(names, "a C operator")


def prepare(dtype: torch.dtype) -> None:
    """Build what a model of this type needs on CPU, ahead of its first use: seconds on a machine's first start."""
    suffix = NATIVE_SUFFIXES.get(dtype)
    sources = [*(f"{family}_{suffix}.c" for family in TYPED_SOURCES if suffix), *SOURCES]
    with ThreadPoolExecutor() as pool:
        _choice.libraries.update(zip(sources, pool.map(load_library, sources), strict=True))


def _build_and_load(source: Path) -> ctypes.CDLL | None:
    try:
        if _choice.cache_dir is not None:
            return ctypes.CDLL(str(build(source, _choice.cache_dir)))
        with tempfile.TemporaryDirectory(prefix="millstream-kernels-") as directory:
            return ctypes.CDLL(str(build(source, Path(directory))))
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        _choice.errors[source.name] = str(error)
        logger.warning("%s is not built, the torch versions run instead: %s", source.name, error)
        return None
