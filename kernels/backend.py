"""What decides which version of an operator runs: "auto" takes the C version on CPU where it can be built, else torch.

`configure` is called once by the process that owns the tensors, before the first operator. Without it, C versions are
built in a directory that lasts as long as the process.
"""

import dataclasses
from pathlib import Path
from typing import Literal

Backend = Literal["auto", "torch"]


@dataclasses.dataclass
class _Choice:
    backend: Backend = "auto"
    cache_dir: Path | None = None


_choice = _Choice()


def configure(backend: Backend = "auto", cache_dir: Path | None = None) -> None:
    """Choose the backend, and the directory that keeps compiled code between starts (made with mode 0700)."""
    _choice.cache_dir = cache_dir
    set_backend(backend)


def set_backend(backend: Backend) -> None:
    """Choose the backend alone: "torch" runs the reference of every operator."""
    if backend not in {"auto", "torch"}:
        raise ValueError(f"unknown kernel backend {backend!r}: known are auto, torch")
    _choice.backend = backend
