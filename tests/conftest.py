"""Options and fixtures of the whole suite."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import millstream
from millstream.common.cpu import C_COMPILERS
from tests.e2e.server_process import EXACT_FLAGS, ServerProcess, serving


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-tools", action="store_true", help="fail, not skip, where a system tool is missing")
    parser.addoption("--expect-package", help="fail unless millstream is imported from this directory")


def pytest_sessionstart(session: pytest.Session) -> None:
    expected = session.config.getoption("--expect-package")
    found = Path(next(iter(millstream.__path__)))
    if expected and Path(expected).resolve() not in found.resolve().parents:
        raise pytest.UsageError(f"millstream comes from {found}, not from {expected}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background shell it is ignored, by children too


@pytest.fixture(scope="session")
def system_tool(request: pytest.FixtureRequest) -> Callable[[str, str], str]:
    """A function (tool, command that installs it) -> its path; skips the test where it is missing."""

    def find(tool: str, install: str) -> str:
        path = shutil.which(tool)
        if path:
            return path
        message = f"{tool} is missing; install it with: {install}"
        if request.config.getoption("--require-tools"):
            pytest.fail(message)
        pytest.skip(message)

    return find


@pytest.fixture(scope="session")
def c_compiler(system_tool: Callable[[str, str], str]) -> str:
    """The path of a C compiler; skips what tests C operators where there is none."""
    tool = next((name for name in C_COMPILERS if shutil.which(name)), C_COMPILERS[0])
    return system_tool(tool, "apt-get install gcc libc6-dev")


@pytest.fixture(scope="session")
def default_server() -> Iterator[ServerProcess]:
    """The packaged model with default flags, for all tests that leave nothing behind."""
    with serving("smollm2") as server:
        yield server


@pytest.fixture(scope="session")
def exact_server() -> Iterator[ServerProcess]:
    """The packaged model in float32, with a log of everything, for all tests that leave nothing behind."""
    with serving("smollm2", *EXACT_FLAGS, "--log-level", "debug") as server:
        yield server
