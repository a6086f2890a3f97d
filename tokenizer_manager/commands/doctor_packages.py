"""Which packages are installed, found without importing any: torch alone would take seconds."""

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path

NAME = "millstream"
REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?[^;]*(;.*)?")
CUDA_LINE = re.compile(r"^cuda(?:: Optional\[str\])? = '([\d.]+)'", re.MULTILINE)


def check_packages() -> tuple[dict[str, str], list[str]]:
    """What a server needs and has (name -> version), and what is missing or too old."""
    found: dict[str, str] = {}
    wrong: list[str] = []
    for name, oldest in requirements().items():
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        if as_numbers(found[name]) < as_numbers(oldest):
            wrong.append(f"{name} {found[name]} is older than {oldest}")
    return found, wrong


def requirements() -> dict[str, str]:
    """Package -> oldest version (or ""), without the extras'; from the installed package, or the source tree."""
    try:
        lines = importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
        lines = project["project"]["dependencies"]
    matches = [REQUIREMENT.fullmatch(line) for line in lines]
    return {found[1]: found[2] or "" for found in matches if found and "extra" not in (found[3] or "")}


def torch_build() -> tuple[str | None, str | None]:
    """torch's version and the CUDA that it was built for, each None where there is none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    cuda = CUDA_LINE.search((Path(spec.origin).parent / "version.py").read_text())
    return importlib.metadata.version("torch"), cuda[1] if cuda else None


def as_numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: "2.13.0+cpu" is (2, 13, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
