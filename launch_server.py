"""`python -m millstream.launch_server --model-path MODEL ...`: SGLang's spelling of `millstream serve`."""

import sys

from .__main__ import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
