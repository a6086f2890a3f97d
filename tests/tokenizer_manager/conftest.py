"""The servers that the tests of this folder talk to."""

from collections.abc import Iterator

import pytest

from tests.tokenizer_manager.live_server import LiveServer


@pytest.fixture
def server() -> Iterator[LiveServer]:
    """A ready server in front of an EchoBackend, for one test."""
    with LiveServer() as live:
        yield live


@pytest.fixture(scope="module")
def shared_server() -> Iterator[LiveServer]:
    """One server for all tests of a module that leave nothing behind."""
    with LiveServer() as live:
        yield live
