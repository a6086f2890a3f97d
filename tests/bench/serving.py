"""Our server, llama.cpp and vLLM in turn, with the same prompts from the same client: tokens a second and TTFT.

    tests/bench/peers/setup.sh
    python -m tests.bench.serving [--servers ours,llama,vllm] [--concurrency 1,8,32] [--rounds 1]

Prints one JSON line for each measurement, then a Markdown table of medians.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NUM_PROMPTS = {1: 6, 8: 16, 32: 64}
PORT = 31000
START_SECONDS = 300


def start(server: str, port: int) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers; prints how long that took."""
    if server == "ours":
        command = [sys.executable, "-m", "millstream", "serve", "smollm2", "--port", str(port)]
        health = "/readyz"
    else:
        command = [str(HERE / "peers" / "serve.sh"), server, str(port)]
        health = "/health"
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not _answers(f"http://127.0.0.1:{port}{health}"):
        if process.poll() is not None or time.monotonic() - began > START_SECONDS:
            process.kill()
            raise SystemExit(f"{server} did not start; is it installed? (tests/bench/peers/setup.sh)")
        time.sleep(0.1)
    print(json.dumps({"server": server, "start_to_ready_s": round(time.monotonic() - began, 2)}), flush=True)
    return process


def measure(server: str, concurrency: int, seed: int, port: int) -> dict[str, Any]:
    """One run of the load client; prints and returns its JSON line."""
    client = [sys.executable, str(HERE / "peers" / "load.py"), "--base-url", f"http://127.0.0.1:{port}"]
    prompts = str(NUM_PROMPTS.get(concurrency, 2 * concurrency))
    load = ["--concurrency", str(concurrency), "--num-prompts", prompts, "--seed", str(seed)]
    done = subprocess.run([*client, *load], capture_output=True, text=True, check=True)
    result: dict[str, Any] = {"server": server, **json.loads(done.stdout)}
    print(json.dumps(result), flush=True)
    return result


def print_table(results: list[dict[str, Any]]) -> None:
    """Medians over the rounds."""
    cells: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        cells[result["server"], result["concurrency"]].append(result)
    print(
        "\n| server | concurrency | output tokens/s | TTFT p50 ms | TPOT p50 ms | errors |\n|---|---|---|---|---|---|"
    )
    for (server, concurrency), runs in cells.items():
        middle = [statistics.median(run[key] for run in runs) for key in ("output_tok_s", "ttft_ms_p50", "tpot_ms_p50")]
        values = " | ".join(f"{value:.1f}" for value in middle)
        print(f"| {server} | {concurrency} | {values} | {sum(run['errors'] for run in runs)} |")


def main() -> None:
    """Measure every server in turn, one process at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--servers", default="ours,llama,vllm")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    results = []
    for number, server in enumerate(args.servers.split(",")):
        process = start(server, PORT + number)
        try:
            results += [
                measure(server, int(concurrency), seed, PORT + number)
                for seed in range(1, args.rounds + 1)
                for concurrency in args.concurrency.split(",")
            ]
        finally:
            process.terminate()
            process.wait()
    print_table(results)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    main()
