"""The project's own files, parsed once, for the tests of its rules."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROCESS_FOLDERS = ("tokenizer_manager", "scheduler", "tp_worker", "detokenizer")
PRODUCT_FOLDERS = (*PROCESS_FOLDERS, "common", "kernels")


def product_files() -> list[Path]:
    """Every Python file of the product, tests excluded."""
    return sorted([*ROOT.glob("*.py"), *(file for folder in PRODUCT_FOLDERS for file in (ROOT / folder).rglob("*.py"))])


def files_of_tests() -> list[Path]:
    """Every Python file below tests/."""
    return sorted((ROOT / "tests").rglob("*.py"))


def all_files() -> list[Path]:
    """Product and tests."""
    return [*product_files(), *files_of_tests()]


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(), str(path))


def name_of(path: Path) -> str:
    """The path as a reader of a failure wants it."""
    return str(path.relative_to(ROOT))


def folder_of(path: Path) -> str:
    """The top-level folder, or "" for the root's own files."""
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else ""


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    return [node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def imported_modules(path: Path) -> set[str]:
    """Dotted names of what a file imports; our own as `FOLDER.module`, whatever spelling it used."""
    own = path.relative_to(ROOT).parts
    names: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("millstream.") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(own[: len(own) - node.level]) if node.level else []
            dotted = ".".join([*base, *([node.module] if node.module else [])]).removeprefix("millstream.")
            names |= {dotted} if node.module else {f"{dotted}.{alias.name}".lstrip(".") for alias in node.names}
    return names
