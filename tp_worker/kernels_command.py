"""`millstream kernels`: which versions of each operator exist, which one a server would run here, and why."""

import json
import logging
import sys
from dataclasses import asdict, dataclass
from typing import Any

from ..common.command_line import Parser, add_flags
from ..common.config import ServerArgs, cache_dir
from ..common.flags import ConfigError, flags
from ..common.logs import quiet_below
from ..kernels import backend, compiler
from ..kernels.catalogue import REFERENCE
from ..kernels.linear import DenseWeight
from ..kernels.linear_int4 import Int4Weight
from ..kernels.linear_int8 import Int8Weight
from ..kernels.linear_w8a8 import W8A8Weight
from ..kernels.operators import OperatorReport, describe_operators
from .device import choose_device, choose_dtype
from .linear_layer import MAX_QUANTISED_ROWS

BAD_COMMAND_LINE = 2
SERVER_FLAGS = ("dtype", "device", "kernel_backend")
GROUPS = {"model": "a model's type, as in millstream serve", "devices": "devices, as in millstream serve"}
FORMATS = {"dense": DenseWeight, "int4": Int4Weight, "int8": Int8Weight, "w8a8": W8A8Weight}
LONGEST_REASON = 60  # characters that stand in the table


@dataclass(frozen=True)
class WeightFormat:
    """How linear layers may keep weights. `max_rows` bounds the tokens of the steps that it serves, None does not."""

    name: str
    operator: str
    is_used: bool
    max_rows: int | None


@dataclass(frozen=True)
class Report:
    """What the command prints. `compiler` is what builds C code and with which flags, or why nothing does."""

    device: str
    dtype: str
    kernel_backend: str
    compiler: str
    operators: list[OperatorReport]
    weight_formats: list[WeightFormat]


def main(argv: list[str]) -> int:
    """0, with or without a compiler; 2 for a wrong command line."""
    try:
        options = _parse(argv)
        as_json = options.pop("json", False)
        report = make_report(ServerArgs(model_path="", **options))
    except ConfigError as error:
        print(f"millstream kernels: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_COMMAND_LINE
    print(json.dumps(asdict(report), indent=2) if as_json else table(report))
    return 0


def _parse(argv: list[str]) -> dict[str, Any]:
    parser = Parser(
        prog="millstream kernels",
        description="Print for every operator which versions exist, which one a server would run here, and why. C code "
        "that is not built yet is built, as a server does at its first start.",
        allow_abbrev=False,
    )
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    add_flags(groups, {name: declared for name, declared in flags(ServerArgs).items() if name in SERVER_FLAGS})
    parser.add_argument("--json", action="store_true", help="one JSON object, for machines")
    return {name: value for name, value in vars(parser.parse_known_flags(argv)).items() if value is not None}


def make_report(args: ServerArgs) -> Report:
    """What a server with these flags would find here. ConfigError where it would not start."""
    backend.configure("torch" if args.kernel_backend == "torch" else "auto", cache_dir())
    device = choose_device(args, 0)
    dtype = choose_dtype(args, device)
    with quiet_below(logging.ERROR, backend.logger.name):  # the table says what is not built
        if device.type == "cpu" and not backend.is_reference_forced():
            backend.prepare(dtype)
        operators = describe_operators(device, dtype)
    name = str(dtype).removeprefix("torch.")
    return Report(device.type, name, args.kernel_backend, _compiler(), operators, _weight_formats(operators))


def _compiler() -> str:
    try:
        path, version = compiler.find_compiler()
    except compiler.BuildError as error:
        return str(error)
    return " ".join((path, f"({version.splitlines()[0]})", *compiler.BASE_FLAGS, *compiler.flag_sets(version)[0]))


def _weight_formats(operators: list[OperatorReport]) -> list[WeightFormat]:
    """Without code for it, a format is not used: the loader makes its layers dense."""
    runs = {operator.name: operator.runs for operator in operators}
    return [
        WeightFormat(
            name,
            f"linear_{name}",
            kind is DenseWeight or runs[f"linear_{name}"] != REFERENCE,
            next((rows for form, rows in MAX_QUANTISED_ROWS.items() if form is kind), None),
        )
        for name, kind in FORMATS.items()
    ]


def table(report: Report) -> str:
    """For people: the version that runs, then each version with what it takes, or why it does not run."""
    notes: list[str] = []
    rows = [("operator", "runs", "version", "takes")]
    for operator in report.operators:
        for version in operator.versions:
            is_first = version is operator.versions[0]
            text = f"not here: {_short(version.why_not, notes)}" if version.why_not else version.takes
            rows.append((is_first * operator.name, is_first * operator.runs, version.name, text))
    formats = [("weights", "", "operator", "rows of a step"), *map(_format_row, report.weight_formats)]
    head = f"{report.dtype} on {report.device}, --kernel-backend {report.kernel_backend}\ncompiler: {report.compiler}"
    foot = "".join(f"\n\n[{number}] {note}" for number, note in enumerate(notes, 1))
    return f"{head}\n\n{_align(rows)}\n\n{_align(formats)}{foot}"


def _short(reason: str, notes: list[str]) -> str:
    """The reason, or the number of the note that it becomes."""
    if len(reason) <= LONGEST_REASON and "\n" not in reason:
        return reason
    if reason not in notes:
        notes.append(reason)
    return f"see [{notes.index(reason) + 1}]"


def _format_row(form: WeightFormat) -> tuple[str, str, str, str]:
    if not form.is_used:
        return form.name, "", form.operator, "not here: without code for it, layers are dense"
    if form.max_rows is None:
        return form.name, "", form.operator, "any number"
    return form.name, "", form.operator, f"up to {form.max_rows}; more with a dense copy, where memory allows both"


def _align(rows: list[tuple[str, str, str, str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ("  ".join([*map(str.ljust, row, widths), row[3]]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
