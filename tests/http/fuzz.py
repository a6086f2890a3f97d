"""Schemathesis over /openapi.json of a server with all processes and a fake worker: `make test-fuzz`.

`python -m tests.http.fuzz --seconds N`: bodies that fit the document and bodies that do not; the checks are no 5xx,
no answer that the document does not describe, and no success for what it forbids. The seed is printed.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tests.e2e.server_process import ServerProcess, serving

FAKE_SERVER = ("-m", "tests.e2e.fake_server")
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
PAUSE = "/pause_generation"  # after it, all others wait: it has a run of its own


def fuzz(server: ServerProcess, *options: str, shows: bool = False) -> "subprocess.CompletedProcess[str]":
    """Run Schemathesis; its exit code is 0 where every check held. It `shows` what it does, or keeps its output."""
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{server.url}/openapi.json"]
    fixed = ["--checks", ",".join(CHECKS), "--warnings", "off", "--request-timeout", "30", "--no-color"]
    return subprocess.run(
        [*command, *fixed, *options], cwd=server.directory, capture_output=not shows, text=True, check=False
    )


def main() -> int:
    """All phases, for as long as is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    seconds = parser.parse_args().seconds
    with serving("smollm2", "--context-length", "128", program=FAKE_SERVER) as server:
        codes = [
            fuzz(server, "--exclude-path", PAUSE, "--max-time", str(seconds), shows=True).returncode,
            fuzz(server, "--include-path", PAUSE, "--max-examples", "100", shows=True).returncode,
        ]
        assert server.post("/continue_generation", {}).status_code == 200
        assert server.complete()["choices"]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
