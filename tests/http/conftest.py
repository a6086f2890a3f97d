"""The servers that the tests of this folder talk to."""

from tests.tokenizer_manager.conftest import server, shared_server

__all__ = ["server", "shared_server"]
