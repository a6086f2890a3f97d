"""What the scheduler tells of its load."""

from tests.scheduler.harness import Harness


def test_the_snapshot_counts_sampled_tokens_as_they_come() -> None:
    harness = Harness()
    harness.ask("a", [1, 2, 3], 10)
    harness.step()
    harness.step()
    before = harness.scheduler.take_snapshot(harness.now).output_tokens_total
    assert 0 < before < 10
    harness.run()
    assert harness.scheduler.take_snapshot(harness.now).output_tokens_total == 10
