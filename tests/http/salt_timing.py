"""Whether time tells what another salt has cached (B45): `make test-salts`, some minutes on idle cores.

`python -m tests.http.salt_timing --pairs N`: in each pair two prompts of the same length come under a salt of their
own: one that another salt has just computed, and one that nobody has. Their times to the first token must not differ
by more than 5 % in the median pair, and no token of theirs may come from the cache. The time of a real hit is shown
beside them.
"""

import argparse
import random
import statistics
import sys
import time

from tests.e2e.server_process import ServerProcess, serving

PROMPT_LEN = 1500
MAX_DIFFERENCE = 0.05
KINDS = ("seen", "unseen", "hit")


def seconds_to_first_token(server: ServerProcess, prompt: list[int], salt: str, cached: bool) -> float:
    """Of one request; AssertionError unless its prompt is cached, or not, as told."""
    begin = time.perf_counter()
    response = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "cache_salt": salt})
    seconds = time.perf_counter() - begin
    num_cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (num_cached > PROMPT_LEN / 2) == cached, f"{num_cached} tokens were cached"
    assert cached or num_cached == 0, f"{num_cached} tokens were cached"
    return seconds


def measure(server: ServerProcess, num_pairs: int, rng: random.Random) -> dict[str, list[float]]:
    """The seconds of each kind; within a pair the order is drawn."""
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(num_pairs):
        prompts = {kind: rng.choices(range(100, 40_000), k=PROMPT_LEN) for kind in ("seen", "unseen")}
        seconds_to_first_token(server, prompts["seen"], f"first-{number}", cached=False)
        for kind in rng.sample(list(prompts), 2):
            seconds[kind].append(seconds_to_first_token(server, prompts[kind], f"second-{number}", cached=False))
        seconds["hit"].append(seconds_to_first_token(server, prompts["seen"], f"first-{number}", cached=True))
    return seconds


def main() -> int:
    """Measure, print, and say whether the bound holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with serving("smollm2", "--context-length", "2048") as server:
        measure(server, 2, random.Random(0))  # the machine is warm
        seconds = measure(server, args.pairs, random.Random(args.seed))
    medians = {kind: statistics.median(times) for kind, times in seconds.items()}
    pairs = zip(seconds["seen"], seconds["unseen"], strict=True)
    difference = statistics.median(seen / unseen for seen, unseen in pairs) - 1
    print(f"{args.pairs} pairs of {PROMPT_LEN} tokens, median seconds to the first token:")
    print(*(f"{kind} {median:.3f}" for kind, median in medians.items()), sep=", ")
    print(f"seen under another salt against never seen: {difference:+.1%} (at most {MAX_DIFFERENCE:.0%} either way)")
    return int(abs(difference) > MAX_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
