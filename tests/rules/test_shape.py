"""The shape of the code: sizes, names, annotations, layout."""

import ast
import statistics
import tomllib
from pathlib import Path

import pytest

from tests.rules.source_files import (
    PROCESS_FOLDERS,
    PRODUCT_FOLDERS,
    ROOT,
    all_files,
    functions,
    name_of,
    parse,
    product_files,
)

pytestmark = pytest.mark.source_tree

MAX_FILE_LINES = 400
MAX_MEDIAN_LINES = 150
MAX_FUNCTION_LINES = 60
MAX_LOOP_LINES = 25
VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "helper.py", "misc.py", "common.py", "base.py", "tools.py"}


def num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_file_is_longer_than_400_lines() -> None:
    sizes = {name_of(path): len(path.read_text().splitlines()) for path in all_files()}
    assert not {name: size for name, size in sizes.items() if size > MAX_FILE_LINES}


def test_the_median_file_is_short() -> None:
    sizes = [len(path.read_text().splitlines()) for path in product_files()]
    assert statistics.median(sizes) <= MAX_MEDIAN_LINES


def test_no_function_is_longer_than_60_lines() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno} {node.name} has {num_lines(node)} lines"
        for path in all_files()
        for node in functions(path)
        if num_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not wrong


def test_every_function_is_annotated() -> None:
    wrong = []
    for path in all_files():
        for node in functions(path):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [arg.arg for arg in arguments if arg.annotation is None and arg.arg not in {"self", "cls"}]
            if bare or node.returns is None:
                wrong.append(f"{name_of(path)}:{node.lineno} {node.name}: {bare or 'no return type'}")
    assert not wrong


def test_no_file_has_a_vague_name() -> None:
    assert not [name_of(path) for path in all_files() if path.name in VAGUE_NAMES]


def test_no_function_changes_a_global() -> None:
    wrong = [name_of(path) for path in product_files() if any(isinstance(n, ast.Global) for n in ast.walk(parse(path)))]
    assert not wrong


def test_only_the_root_is_a_regular_package() -> None:
    found = {name_of(path) for path in ROOT.rglob("__init__.py") if not {".venv", "build"} & set(path.parts)}
    assert found - {".pkg/millstream/__init__.py"} == {"__init__.py"}


def test_every_folder_with_code_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(("millstream", *path.parent.relative_to(ROOT).parts)) for path in product_files()}
    assert set(listed) == folders


def test_every_top_level_folder_of_the_design_is_there() -> None:
    assert not [name for name in (*PRODUCT_FOLDERS, "tests", "deploy") if not (ROOT / name).is_dir()]
    assert (ROOT / ".pkg" / "millstream").resolve() == ROOT


@pytest.mark.parametrize("folder", [name for name in PROCESS_FOLDERS if name != "tokenizer_manager"])
def test_each_process_folder_has_its_wiring_and_one_short_loop(folder: str) -> None:
    process = ROOT / folder / "process.py"
    loops = [
        loop
        for path in sorted((ROOT / folder).glob("*.py"))
        for loop in ast.walk(parse(path))
        if isinstance(loop, ast.While) and isinstance(loop.test, ast.Constant) and loop.test.value is True
    ]
    process_loops = [loop for loop in ast.walk(parse(process)) if isinstance(loop, ast.While)]
    assert any(node.name == "run" for node in functions(process))
    assert len(process_loops) == 1
    assert all(num_lines(loop) <= MAX_LOOP_LINES for loop in loops)


def test_the_packages_of_the_wheel_are_the_folders() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert not [folder for folder in PRODUCT_FOLDERS if f'"millstream.{folder}"' not in text]


def test_there_is_no_unfinished_work_in_the_product() -> None:
    words = ("NotImplementedError", "TODO", "FIXME", "XXX", "HACK")
    wrong = [f"{name_of(path)}: {word}" for path in product_files() for word in words if word in Path(path).read_text()]
    assert not wrong
