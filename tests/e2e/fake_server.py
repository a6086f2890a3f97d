"""`millstream serve` with the fake worker in the ranks' place: everything else is real."""

import sys

from millstream.common.command_line import parse_args
from millstream.tokenizer_manager.children import Entries
from millstream.tokenizer_manager.serve_command import bind_port
from millstream.tokenizer_manager.server import serve

if __name__ == "__main__":
    args = parse_args(sys.argv[1:])
    sys.exit(serve(args, bind_port(args), Entries(tp_worker="tests.scheduler.fake_worker:run")))
