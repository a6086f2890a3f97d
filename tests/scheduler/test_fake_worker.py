"""The fake worker keeps the contract, and it notices what would corrupt a real cache."""

from collections.abc import Callable

import pytest

from millstream.scheduler.page_pool import PagePool
from millstream.scheduler.req import Req
from tests.scheduler.contract import CHECKS, WorkerUnderTest
from tests.scheduler.fake_worker import FakeWorker
from tests.scheduler.harness import Harness


def make_worker() -> WorkerUnderTest:
    worker = FakeWorker(num_pages=64, page_size=4, vocab_size=50)
    return WorkerUnderTest(worker.run_step, page_size=4, num_pages=64, vocab_size=50)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_fake_worker_keeps_the_contract(check: Callable[[WorkerUnderTest], None]) -> None:
    check(make_worker())


def test_it_gives_other_tokens_when_a_shared_page_holds_other_content() -> None:
    outputs = []
    for overwrite in (False, True):
        harness = Harness(page_size=4)
        harness.ask("first", list(range(20)), 2)
        harness.run()
        if overwrite:
            harness.worker.slots.reverse()
        client = harness.ask("second", list(range(20)), 2)
        harness.run()
        outputs.append(client.output_ids)
    assert outputs[0] != outputs[1]


def test_it_refuses_a_page_that_two_requests_write(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(page_size=4)
    harness.ask("a", [1, 2, 3, 4, 5], 4)
    harness.plan()
    page_ids = harness.req("a").page_ids.copy()

    def grow_onto_pages_in_use(pool: PagePool, req: Req, kv_len: int) -> bool:
        req.page_ids += page_ids
        req.kv_allocated_len = kv_len
        return True

    monkeypatch.setattr(PagePool, "grow", grow_onto_pages_in_use)
    harness.ask("b", [6, 7, 8, 9, 10], 4)
    batch = harness.scheduler.get_next_batch_to_run(0.0)
    assert batch is not None
    with pytest.raises(AssertionError, match="another row has it"):
        harness.worker.run_step(batch)
