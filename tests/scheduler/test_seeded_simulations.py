"""Two thousand random storms, each the same for its seed; `simulate_seed` plays one again, `long_battery` many more."""

import os
from collections import Counter

import pytest

from tests.scheduler.long_battery import run_battery

NUM_SEEDS = 2000
SEEDS_PER_RARITY = 100  # by so many, each of the rare situations is met once at the least
SECONDS = 600
RARE = ("retracted", "backfilled", "hit tokens", "waits", "private", "ending", "status str", "status 429", "status 503")


@pytest.mark.timeout(SECONDS)
def test_no_storm_loses_a_request_a_page_or_a_token() -> None:
    seen: Counter[str] = Counter()
    failures: list[str] = []
    for met, failed in run_battery(0, NUM_SEEDS, SECONDS, os.cpu_count() or 1):
        seen += met
        failures += failed
    assert not failures, "\n\n".join(failures)
    assert min(seen[name] for name in RARE) >= NUM_SEEDS / SEEDS_PER_RARITY, f"storms are too mild: {dict(seen)}"
