"""The real worker keeps the contract that the scheduler's fake one keeps."""

from collections.abc import Callable

import pytest

from millstream.tp_worker.worker import Worker
from tests.scheduler.contract import CHECKS, WorkerUnderTest


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_worker_keeps_the_contract(check: Callable[[WorkerUnderTest], None], worker: Worker) -> None:
    limits = worker.rows.limits
    check(WorkerUnderTest(worker.run_step, limits.page_size, limits.num_pages, limits.vocab_size))
