"""llm, the command line: a model of extra-openai-models.yaml, streamed, and the log that it keeps."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = """
- model_id: here
  model_name: smollm2
  api_base: {url}/v1
"""


def main() -> None:
    """Talk to BASE_URL."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "extra-openai-models.yaml").write_text(MODELS.format(url=os.environ["BASE_URL"]))
        environment = {**os.environ, "LLM_USER_PATH": directory, "OPENAI_API_KEY": "none"}

        def llm(*args: str) -> str:
            command = [str(Path(sys.executable).parent / "llm"), *args]
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

        options = ["-o", "temperature", "0", "-o", "max_tokens", "24"]
        text = llm("-m", "here", *options, "What is the capital of France?")
        assert "Paris" in text
        assert llm("-m", "here", "--no-stream", *options, "What is the capital of France?") == text
        assert "Paris" in llm("logs", "-r")


if __name__ == "__main__":
    main()
