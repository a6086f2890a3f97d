"""The tiny model of these tests, loaded once."""

from pathlib import Path

import pytest

from millstream.tp_worker.rows import Rows
from millstream.tp_worker.worker import Worker
from tests.tp_worker.driver import load_tiny_worker, tiny_args, write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny Llama's config, for dummy weights."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def loaded_worker(tiny_model: Path) -> Worker:
    """A ready worker of the tiny model."""
    return load_tiny_worker(tiny_args(tiny_model))


@pytest.fixture
def worker(loaded_worker: Worker) -> Worker:
    """The worker with fresh rows; its KV pages hold what the test before left there, as they do in a server."""
    loaded_worker.rows = Rows(loaded_worker.rows.limits)
    return loaded_worker
