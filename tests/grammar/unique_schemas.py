"""JSON Schemas that no other request has: each is answered with one token, and little of them is kept."""

from collections.abc import Mapping
from typing import Any

import psutil

from millstream.tokenizer_manager.grammar.grammar_checker import MAX_GRAMMARS
from tests.e2e.server_process import ServerProcess

MOST_KEPT_MIB = 64


def unique_schema(number: int) -> dict[str, Any]:
    """One that has this number in it."""
    fields = {f"field_{number}_{index}": {"type": "string", "maxLength": 50} for index in range(5)}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def kept_of(server: ServerProcess, num: int, headers: Mapping[str, str] | None = None) -> float:
    """What the server's processes keep of so many, in MiB, beside what the first ones need."""
    ask_for(server, range(-MAX_GRAMMARS, 0), headers)
    before = memory_mib(server)
    ask_for(server, range(num), headers)
    return memory_mib(server) - before


def ask_for(server: ServerProcess, numbers: range, headers: Mapping[str, str] | None = None) -> None:
    """One token of each."""
    for first in numbers[::MAX_GRAMMARS]:
        batch = range(first, min(first + MAX_GRAMMARS, numbers.stop))
        params = [{"json_schema": unique_schema(number), "max_new_tokens": 1} for number in batch]
        body = {"text": ["x"] * len(batch), "sampling_params": params}
        response = server.post("/generate", body, headers=headers, timeout=60)
        assert response.status_code == 200, response.text
        assert all(answer["meta_info"]["completion_tokens"] == 1 for answer in response.json())


def memory_mib(server: ServerProcess) -> float:
    """What all processes of the server hold in memory."""
    main = psutil.Process(server.process.pid)
    return sum(process.memory_info().rss for process in [main, *main.children(recursive=True)]) / 2**20
