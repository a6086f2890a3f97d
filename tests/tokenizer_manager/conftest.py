"""The server that most tests of this folder talk to."""

from collections.abc import Iterator

import pytest

from tests.tokenizer_manager.live_server import LiveServer


@pytest.fixture
def server() -> Iterator[LiveServer]:
    """A ready server in front of an EchoBackend."""
    with LiveServer() as live:
        yield live
