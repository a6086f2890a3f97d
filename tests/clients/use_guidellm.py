"""guidellm: a short benchmark over chat completions, in which no request fails and its counts are the server's."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Drive BASE_URL with two streams."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        command = [
            *(str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={os.environ['BASE_URL']},model=smollm2"),
            *("--tokenizer", f"kind=hf_auto,model={os.environ['TOKENIZER']}"),
            *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
            *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
            *("--output", f"kind=json,path={report}"),
        ]
        subprocess.run(command, check=True, timeout=240)
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["errored"] == 0, totals
    assert totals["successful"] >= 6, totals


if __name__ == "__main__":
    main()
