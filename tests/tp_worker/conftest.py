"""The tiny model of these tests."""

from pathlib import Path

import pytest

from millstream.tp_worker.worker import Worker
from tests.tp_worker.driver import load_tiny_worker, tiny_args, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama's config, for dummy weights."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def worker(tiny_model: Path) -> Worker:
    """A ready worker of the tiny model, alone."""
    return load_tiny_worker(tiny_args(tiny_model))
