"""README.md names what is there, and all of it."""

import re

import pytest

from millstream.common.config import ServerArgs
from millstream.common.flags import flag_name, flags
from tests.rules.source_files import ROOT

pytestmark = pytest.mark.source_tree

README = (ROOT / "README.md").read_text()


def test_every_linked_file_exists() -> None:
    links = re.findall(r"\]\(([\w./-]+)\)", README)
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_every_flag_is_in_the_readme_and_every_flag_in_it_is_real() -> None:
    known = {flag_name(name) for name in flags(ServerArgs)} | {
        alias for _, _, declared in flags(ServerArgs).values() for alias in declared.aliases
    }
    named = set(re.findall(r"`(--[\w-]+)", README))
    assert not {flag_name(name) for name in flags(ServerArgs)} - named
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
    named = re.findall(r"`(?:GET|POST) (/[\w/]+)`", README)
    assert named
    assert not [path for path in named if f'"{path}"' not in routes]
