"""One random storm from a seed: `python -m tests.scheduler.simulate_seed SEED` plays it again and tells every event."""

import logging
import sys
from collections import Counter
from collections.abc import Callable
from random import Random

from millstream.common.messages import PAUSE_MODES
from tests.scheduler.storm import NONSENSE, Storm
from tests.scheduler.storm_end import finish
from tests.scheduler.storm_set_up import SHARED_LENS, draw_ask, draw_set_up

CROWD = 150  # requests that come at once, now and then: more than are looked at in a step
KINDS = {"ask": 8, "steps": 10, "plan": 5, "answer": 5, "abort": 2, "text": 3, "control": 2, "advance": 1, "rare": 2}


def random_event(storm: Storm, rng: Random) -> None:
    """One event, likely or rare."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    if kind == "ask" or not storm.asked:
        burst(storm, rng, rng.choice([1, 1, 2, 5]))
        return
    rid = rng.choice(list(storm.asked))
    events: dict[str, Callable[[], object]] = {
        "steps": lambda: storm.steps(rng.randrange(1, 12), rng.choice([1, 2, 2])),
        "plan": storm.plan,
        "answer": storm.answer,
        "abort": lambda: storm.abort(rng.choice([[rid], [rid], [rid, rid, "unknown"], some_rids(storm, rng)])),
        "text": lambda: storm.end_text(rid, rng.choice([0, 0, 1, 5])),
        "control": lambda: control_event(storm, rng),
        "advance": lambda: storm.advance(rng.choice([1.0, 10.0, 30.0])),
        "rare": lambda: rare_event(storm, rng, rid),
    }
    events[kind]()


def burst(storm: Storm, rng: Random, num_requests: int) -> None:
    """Requests that come at once."""
    for _ in range(num_requests):
        storm.ask(draw_ask(rng, storm.shared_lens))


def some_rids(storm: Storm, rng: Random) -> list[str]:
    """Half of all that ever were."""
    return rng.sample(list(storm.asked), len(storm.asked) // 2)


def control_event(storm: Storm, rng: Random) -> None:
    """Pause, continue or flush."""
    mode = rng.choice(PAUSE_MODES)
    rng.choice([lambda: storm.pause(mode), storm.go_on, storm.go_on, storm.flush])()


def rare_event(storm: Storm, rng: Random, rid: str) -> None:
    """What seldom happens, or should not."""
    index = rng.randrange(len(NONSENSE))
    events: list[Callable[[], object]] = [
        lambda: storm.ask_again(rid),
        lambda: storm.ask_nonsense(index),
        lambda: storm.abort_when_short(30),
        lambda: storm.explain(rid),
        storm.abort_all_and_flush,
        storm.look,
    ]
    rng.choice(events)()


class Failure(AssertionError):
    """A seed that went wrong: which, with which set-up, and how to see it again."""


def storm_of(seed: int, *, check_every: int = 7) -> tuple[Storm, Random]:
    """The storm of a seed before its first event, and the source of its events."""
    rng = Random(seed)
    return Storm(draw_set_up(rng), rng.choice(SHARED_LENS), check_every=check_every), rng


def play(storm: Storm, rng: Random) -> None:
    """A burst of requests, then events of all kinds, then the end; AssertionError where anything is wrong."""
    burst(storm, rng, rng.randrange(1, 8) if rng.random() < 0.98 else CROWD)
    for _ in range(rng.randrange(10, 30)):
        random_event(storm, rng)
    finish(storm, is_aborted=rng.random() < 0.1)


def failure_of(seed: int, storm: Storm, error: Exception) -> Failure:
    """What is told of it."""
    set_up = ", ".join(f"{name}={value}" for name, value in storm.set_up.items())
    again = f"python -m tests.scheduler.simulate_seed {seed}"
    return Failure(f"seed {seed}: {type(error).__name__}: {error}\n    {set_up}\n    {again}")


def run_seed(seed: int) -> Counter[str]:
    """Play a seed; returns the rare situations that it met. Failure where anything is wrong."""
    storm, rng = storm_of(seed)
    try:
        play(storm, rng)
    except Exception as error:
        raise failure_of(seed, storm, error) from error
    return storm.seen


def main(arguments: list[str]) -> None:
    """Play one seed, check after every event, and print them all; the traceback of what is wrong comes last."""
    logging.disable()
    storm, rng = storm_of(int(arguments[0]), check_every=1)
    print("\n".join(f"{name} = {value}" for name, value in storm.set_up.items()))
    try:
        play(storm, rng)
    finally:
        print("\n".join(storm.log))
    print(dict(storm.seen))


if __name__ == "__main__":
    main(sys.argv[1:])
