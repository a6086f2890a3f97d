"""What the server prints while it starts: the plan, the progress of loading, and how to talk to it."""

import sys
import time
from pathlib import Path

from ..common.config import wants_progress_bar
from ..common.messages import LoadProgress

BAR_WIDTH = 30
PLAIN_STEP = 0.25


def print_plan(plan: dict[str, str]) -> None:
    """Print the plan as aligned `name  value` lines."""
    width = max(len(name) for name in plan)
    print("\n".join(f"  {name:<{width}}  {value}" for name, value in plan.items()), flush=True)


class LoadingBar:
    """One bar for all ranks on a terminal; a plain line at every quarter elsewhere."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranks: dict[int, LoadProgress] = {}
        self._redraws = wants_progress_bar()
        self._next_plain = PLAIN_STEP
        self._done = False

    def update(self, progress: LoadProgress) -> None:
        """Take one rank's progress; shown once every rank has told how much it loads."""
        self._ranks[progress.rank] = progress
        if len(self._ranks) < self._num_ranks:
            return
        loaded = sum(rank.loaded_bytes for rank in self._ranks.values())
        total = sum(rank.total_bytes for rank in self._ranks.values())
        share = min(loaded / total, 1.0) if total else 1.0
        size = f"{loaded / 1e6:.0f} of {total / 1e6:.0f} MB"
        if self._redraws:
            filled = round(BAR_WIDTH * share)
            print(f"\rloading weights [{'#' * filled:<{BAR_WIDTH}}] {size}", end="", file=sys.stderr, flush=True)
        elif share >= self._next_plain:
            print(f"loading weights: {share:.0%} ({size})", file=sys.stderr, flush=True)
            self._next_plain = PLAIN_STEP * (share // PLAIN_STEP + 1)

    def finish(self) -> None:
        """End the bar's line."""
        if self._redraws and self._ranks and not self._done:
            print(file=sys.stderr, flush=True)
        self._done = True


def print_ready(url: str, model: str, *, needs_key: bool) -> None:
    """Say that the server is ready, since when, where, the page, and a request that works (with the key put in)."""
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 64, "stream": true}}'
    print(f"ready in {seconds_since_start():.1f} s: {url}")
    print(f"chat: {url}/ui")
    headers = "-H 'Authorization: Bearer KEY' " if needs_key else ""
    headers += "-H 'Content-Type: application/json'"
    print(f"try: curl -N {url}/v1/chat/completions {headers} -d '{body}'", flush=True)


def seconds_since_start() -> float:
    """Seconds since the kernel started this process (field 22 of /proc/self/stat, in ticks of 1/100 s)."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / 100
