"""Who may import whom, and what may be imported where."""

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rules.source_files import (
    PRODUCT_FOLDERS,
    ROOT,
    all_files,
    folder_of,
    imported_modules,
    name_of,
    parse,
    product_files,
)

pytestmark = pytest.mark.source_tree

ALLOWED = {
    "common": {"common"},
    "kernels": {"kernels"},
    "tokenizer_manager": {"tokenizer_manager", "common"},
    "scheduler": {"scheduler", "common"},
    "detokenizer": {"detokenizer", "common"},
    "tp_worker": {"tp_worker", "common", "kernels"},
}
HOMES: dict[str, Callable[[Path], bool]] = {
    "torch": lambda path: folder_of(path) in {"tp_worker", "kernels"},
    "triton": lambda path: folder_of(path) == "kernels",
    "aiohttp": lambda path: folder_of(path) == "tokenizer_manager",
    "uvloop": lambda path: folder_of(path) == "tokenizer_manager",
    "zmq": lambda path: name_of(path) == "common/channel.py",
    "pickle": lambda path: False,
    "cloudpickle": lambda path: False,
    "dill": lambda path: False,
    "marshal": lambda path: False,
    "shelve": lambda path: False,
    "time": lambda path: folder_of(path) != "scheduler" or path.name == "process.py",
    "socket": lambda path: folder_of(path) != "scheduler",
    "datetime": lambda path: folder_of(path) != "scheduler",
}


def test_folders_import_only_what_the_design_allows() -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in product_files()
        if folder_of(path)
        for module in imported_modules(path)
        if module.split(".")[0] in PRODUCT_FOLDERS and module.split(".")[0] not in ALLOWED[folder_of(path)]
    ]
    assert not wrong


def test_libraries_stay_in_their_homes() -> None:
    wrong = [
        f"{name_of(path)} imports {module}"
        for path in product_files()
        for module in imported_modules(path)
        if module.split(".")[0] in HOMES and not HOMES[module.split(".")[0]](path)
    ]
    assert not wrong


def test_there_is_no_import_cycle() -> None:
    graph = {".".join(path.relative_to(ROOT).with_suffix("").parts): imported_modules(path) for path in product_files()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"cycle: {' -> '.join((*trail, module))}"
        if module in done:
            return
        for imported in graph[module] & graph.keys():
            visit(imported, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


def test_our_own_modules_are_imported_relatively() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in product_files()
        for node in ast.walk(parse(path))
        if (isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "millstream")
        or (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "millstream" for alias in node.names))
    ]
    assert not wrong


def test_nothing_that_runs_foreign_code_is_called() -> None:
    banned = {"eval", "exec", "load_module", "recv_pyobj", "send_pyobj"}
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in product_files()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id in banned - {"load_module"})
            or (isinstance(node.func, ast.Attribute) and node.func.attr in banned - {"eval"})
            or ast.unparse(node.func) in {"torch.load", "torch.jit.load", "numpy.load", "np.load"}
            or any(
                keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"
                for keyword in node.keywords
            )
        )
    ]
    assert not wrong


def test_the_environment_is_read_only_in_the_config_module() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in product_files()
        if name_of(path) != "common/config.py"
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv", "environb"}
    ]
    assert not wrong


def test_modules_have_no_mocks_of_our_own_classes() -> None:
    wrong = [name_of(path) for path in all_files() if any("mock" in module for module in imported_modules(path))]
    assert not wrong


@pytest.mark.parametrize(
    "module",
    [
        "tokenizer_manager.server",
        "tokenizer_manager.engine",
        "tokenizer_manager.commands.chat_command",
        "tokenizer_manager.commands.top_command",
        "tokenizer_manager.commands.doctor_command",
        "scheduler.process",
        "detokenizer.process",
    ],
)
def test_processes_without_a_model_never_load_torch(module: str) -> None:
    code = (
        f"import sys, millstream.{module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={"PYTHONPATH": str(ROOT / ".pkg")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr
