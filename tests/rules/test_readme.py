"""README.md names what is there, and all of it; what API.md tells in detail is there too."""

import re
from pathlib import Path

import pytest

from millstream.common.config import ServerArgs
from millstream.common.flags import flag_name, flags
from tests.rules.source_files import ROOT

pytestmark = pytest.mark.source_tree

README_FILE, API_FILE = ROOT / "README.md", ROOT / "tokenizer_manager" / "API.md"
README = README_FILE.read_text()
TEXTS = README + API_FILE.read_text()


@pytest.mark.parametrize("file", [README_FILE, API_FILE], ids=lambda file: file.name)
def test_every_linked_file_exists(file: Path) -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", file.read_text())
    assert links
    assert not [link for link in links if not (file.parent / link).exists()]


def test_every_flag_is_in_the_readme_and_every_flag_in_it_is_real() -> None:
    known = {flag_name(name) for name in flags(ServerArgs)} | {
        alias for _, _, declared in flags(ServerArgs).values() for alias in declared.aliases
    }
    named = set(re.findall(r"`(--[\w-]+)", TEXTS))
    assert not {flag_name(name) for name in flags(ServerArgs)} - set(re.findall(r"`(--[\w-]+)", README))
    of_commands = {
        "--no-X",
        "--base-url",
        "--num-prompts",
        "--max-concurrency",
        "--random-input-len",
        "--random-output-len",
        "--seed",
        "--json",
    }
    assert not named - known - of_commands


def test_every_route_in_the_readme_is_real() -> None:
    routes = (ROOT / "tokenizer_manager" / "routes.py").read_text()
    named = re.findall(r"`(?:GET|POST) (/[\w/]+)`", TEXTS)
    assert named
    assert not [path for path in named if f'"{path}"' not in routes]
