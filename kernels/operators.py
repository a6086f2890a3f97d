"""The whole catalogue: importing this module makes every operator known, and `describe_operators` says what would run.

`millstream kernels` prints it.
"""

import inspect
from dataclasses import dataclass

import torch

from . import (  # noqa: F401 - each makes its operators known
    activation,
    attention,
    embedding,
    linear,
    linear_int4,
    linear_int8,
    linear_w8a8,
    logits,
    logprobs,
    rms_norm,
    rotary,
    sampling,
)
from .backend import is_reference_forced
from .catalogue import REFERENCE, Operator, Version, known_operators

FORCED = "--kernel-backend torch"


@dataclass(frozen=True)
class VersionReport:
    """`takes` is what the version is for; `why_not` is empty where it may run."""

    name: str
    takes: str
    why_not: str


@dataclass(frozen=True)
class OperatorReport:
    """One operator: what it computes, the version that runs wherever it takes the operands, and all versions."""

    name: str
    contract: str
    runs: str
    versions: list[VersionReport]


def describe_operators(device: torch.device, dtype: torch.dtype) -> list[OperatorReport]:
    """Every operator, for a model of this type on this device, with the chosen backend."""
    return [_describe(known, device, dtype) for known in known_operators()]


def _describe(known: Operator[..., object], device: torch.device, dtype: torch.dtype) -> OperatorReport:
    versions = [_describe_version(version, device, dtype) for version in known.versions]
    runs = next((version.name for version in versions if not version.why_not), REFERENCE)
    rest = "everything else" if runs != REFERENCE else "everything"
    reference = VersionReport(REFERENCE, f"{rest}: the reference", "")
    return OperatorReport(known.name, _first_sentence(known.reference), runs, [*versions, reference])


def _describe_version(version: Version[..., object], device: torch.device, dtype: torch.dtype) -> VersionReport:
    why_not = FORCED if is_reference_forced() else version.why_not(device, dtype)
    return VersionReport(version.name, _first_line(version.function), why_not)


def _first_line(function: object) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _first_sentence(function: object) -> str:
    paragraph = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())
