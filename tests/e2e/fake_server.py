"""`millstream serve` with the fake worker in the ranks' place: everything else is real.

`python -m tests.e2e.fake_server [slow] ARGS`: a slow worker takes 30 ms for a step.
"""

import sys

from millstream.common.config import ChildConfig
from millstream.common.settings import read_settings
from millstream.tokenizer_manager.children import Entries
from millstream.tokenizer_manager.port import bind_port
from millstream.tokenizer_manager.server import serve
from tests.scheduler import fake_worker

SIZES = {"num_pages": 8192, "vocab_size": 49152}  # of the packaged model


def run_worker(config: ChildConfig) -> None:
    """A worker that is faster than its clients."""
    fake_worker.serve(config, **SIZES)


def run_slow_worker(config: ChildConfig) -> None:
    """A worker that lets a queue grow."""
    fake_worker.serve(config, step_seconds=0.03, **SIZES)


if __name__ == "__main__":
    is_slow = sys.argv[1] == "slow"
    settings = read_settings(sys.argv[1 + is_slow :], {})
    worker = "run_slow_worker" if is_slow else "run_worker"
    sys.exit(
        serve(
            settings,
            bind_port(settings.args.host, settings.args.port),
            Entries(tp_worker=f"tests.e2e.fake_server:{worker}"),
        )
    )
