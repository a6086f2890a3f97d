"""Two thousand random storms, each the same for its seed; `simulate_seed` plays one again, `long_battery` many more."""

from collections import Counter

import pytest

from tests.scheduler.simulate_seed import Failure, run_seed

SEEDS_PER_BLOCK = 100
NUM_BLOCKS = 20
RARE = ("retracted", "backfilled", "hit tokens", "waits", "private", "ending", "status str", "status 429", "status 503")


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_no_storm_loses_a_request_a_page_or_a_token(block: int) -> None:
    seeds = range(block * SEEDS_PER_BLOCK, (block + 1) * SEEDS_PER_BLOCK)
    seen: Counter[str] = Counter()
    failures = []
    for seed in seeds:
        try:
            seen += run_seed(seed)
        except Failure as failure:
            failures.append(str(failure))
    assert not failures, "\n\n".join(failures)
    assert not [name for name in RARE if not seen[name]], f"storms are too mild: {dict(seen)}"
