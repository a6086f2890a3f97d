"""`make test-clients`: real clients against a live server, those with a package in environments below build/clients.

`python -m tests.clients.run [NAME ...]` runs all of them or some, prints what each ran with, and ends with 1 if one
of them failed.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from millstream.common.model_path import find_model
from millstream.common.tokenizer import load_tokenizer
from tests.e2e.server_process import ROOT, ServerProcess, serving

HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / "build" / "clients"
CLIENT_SECONDS = 300
BUSY_SERVER = ("-m", "tests.e2e.fake_server", "slow")  # a place for one, and one more may wait


@dataclass(frozen=True)
class Client:
    """A client: what is installed for it ("": it is one of the development packages), and the script that uses it."""

    name: str
    script: str
    package: str = ""
    shares_packages: bool = False  # of the development environment: torch is large


CLIENTS = [
    Client("openai", "use_openai.py"),
    Client("openai (Node)", "use_openai.mjs", "openai@6.49.0"),
    Client("anthropic", "use_anthropic.py"),
    Client("litellm", "use_litellm.py", "litellm==1.110.2"),
    Client("langchain-openai", "use_langchain.py", "langchain-openai==1.7.4"),
    Client("instructor", "use_instructor.py", "instructor==1.17.0"),
    Client("pydantic-ai", "use_pydantic_ai.py", "pydantic-ai-slim[openai,anthropic]==2.68.0"),
    Client("llm", "use_llm.py", "llm==0.36"),
    Client("guidellm", "use_guidellm.py", "guidellm==0.8.1", shares_packages=True),
    Client("curl", "use_curl.sh"),
]


def main(names: list[str]) -> int:
    """Install, serve, run; the exit code."""
    chosen = [client for client in CLIENTS if not names or client.name in names]
    commands = {client.name: prepare(client) for client in chosen}
    failed = []
    with servers() as variables:
        for client in chosen:
            began = time.monotonic()
            is_good = run(commands[client.name], variables)
            seconds = time.monotonic() - began
            word = "ok" if is_good else "FAILED"
            print(f"{word:8}{client.name:18}{version_of(client):12}{seconds:6.1f} s", flush=True)
            failed += [] if is_good else [client.name]
    print(f"{len(chosen) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def prepare(client: Client) -> list[str]:
    """Install what a client needs, unless it is there; the command that runs its script."""
    script = HERE / client.script
    if script.suffix == ".sh":
        return [needed_tool("bash"), str(script)]
    if script.suffix == ".mjs":
        return [needed_tool("node"), str(prepare_node(client, script))]
    if not client.package:
        return [sys.executable, str(script)]
    return [str(prepare_python(client)), str(script)]


def prepare_node(client: Client, script: Path) -> Path:
    """An npm folder with the package; the script's copy in it, as Node looks for packages beside the script."""
    folder = ENVIRONMENTS / "node"
    folder.mkdir(parents=True, exist_ok=True)
    if is_new(folder, client.package):
        install = ["install", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder), client.package]
        subprocess.run([needed_tool("npm"), *install], check=True)
        (folder / "installed").write_text(client.package)
    return Path(shutil.copy(script, folder))


def prepare_python(client: Client) -> Path:
    """A virtual environment with the package; its interpreter."""
    folder = ENVIRONMENTS / client.name
    python = folder / "bin" / "python"
    if is_new(folder, client.package):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        if client.shares_packages:
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"])
        install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", client.package]
        subprocess.run([str(python), *install], check=True)
        (folder / "installed").write_text(client.package)
    return python


def is_new(folder: Path, package: str) -> bool:
    """Whether this very package is not installed there."""
    stamp = folder / "installed"
    return not stamp.exists() or stamp.read_text() != package


def needed_tool(name: str) -> str:
    """The path of a system tool."""
    path = shutil.which(name)
    if path is None:
        package = "nodejs npm" if name in {"node", "npm"} else name
        sys.exit(f"{name} is missing; install it with: apt-get install {package}")
    return path


@contextlib.contextmanager
def servers() -> Iterator[dict[str, str]]:
    """A server of the packaged model, and a busy one; what the scripts read of them in their environment."""
    busy_flags = ("--max-running-requests", "1", "--max-queued-requests", "1")
    with tempfile.TemporaryDirectory() as folder, serving("smollm2") as server:
        busy = ServerProcess("--model-path", "smollm2", *busy_flags, program=BUSY_SERVER).wait_until_ready()
        try:
            write_tokenizer(Path(folder))
            yield {"BASE_URL": server.url, "BUSY_URL": busy.url, "TOKENIZER": folder}
        finally:
            busy.stop()


def write_tokenizer(folder: Path) -> None:
    """The packaged model's tokenizer, as transformers reads it."""
    tokenizer = load_tokenizer(find_model("smollm2"))
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def run(command: list[str], variables: Mapping[str, str]) -> bool:
    """Run a script to its end; what it printed is shown if it fails."""
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    environment = {**os.environ, **quiet, **variables}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=CLIENT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{command[-1]}: no end within {CLIENT_SECONDS} s")
        return False
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-3000:], sep="\n")
    return not done.returncode


def version_of(client: Client) -> str:
    """What ran."""
    if client.package:
        return re.split("==|@", client.package)[1]
    if client.script.endswith(".sh"):
        return subprocess.run([client.name, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    return version(client.name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
