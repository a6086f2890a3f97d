"""`millstream serve` with the fake worker in the ranks' place: everything else is real."""

import sys

from millstream.common.command_line import parse_args
from millstream.common.config import ChildConfig
from millstream.tokenizer_manager.children import Entries
from millstream.tokenizer_manager.serve_command import bind_port
from millstream.tokenizer_manager.server import serve
from tests.scheduler import fake_worker


def run_worker(config: ChildConfig) -> None:
    """The fake worker, with the sizes of the packaged model."""
    fake_worker.serve(config, num_pages=8192, vocab_size=49152)


if __name__ == "__main__":
    args = parse_args(sys.argv[1:])
    sys.exit(serve(args, bind_port(args), Entries(tp_worker="tests.e2e.fake_server:run_worker")))
