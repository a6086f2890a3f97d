"""`stop_regex` at the edge: what is taken, what is refused and how, and what an answer says of it."""

from typing import Any

import pytest

from tests.tokenizer_manager.live_server import LiveServer

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "abc"},
    GENERATE: {"text": "abc"},
}
REFUSED: list[tuple[Any, str]] = [
    ("(", "missing )"),
    (r"(a)\1", r"invalid escape sequence: \1"),
    ("a(?=b)", "invalid perl operator: (?="),
    ("(?<=a)b", "invalid perl operator: (?<="),
    ("(?<!a)b", "invalid perl operator: (?<"),
    ("a{1,100000}", "invalid repetition size"),
    ("(a{1,1000}){1,1000}", "invalid repetition size"),
    (r"\pL{500}", "too large"),
    ("x{900}", "too large"),
    (["x{150}y", "x{150}z", "x{150}a", "x{150}b"], "too large"),
    (r"\Cb", "not supported"),
    ("a*", "empty text"),
    ("(a*)*$", "empty text"),
    (["ab", ""], "1 to 128 characters"),
    ("a" * 129, "1 to 128 characters"),
    (["a", "b", "c", "d", "e"], "at most 4"),
]


def with_regex(path: str, stop_regex: Any, **fields: Any) -> dict[str, Any]:
    if path == GENERATE:
        return {**BODIES[path], "sampling_params": {"stop_regex": stop_regex}, **fields}
    return {**BODIES[path], "stop_regex": stop_regex, **fields}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("stop_regex", "message"), REFUSED)
def test_a_regex_that_cannot_be_served_is_refused_by_name(
    shared_server: LiveServer, path: str, stop_regex: Any, message: str
) -> None:
    answer = shared_server.post(path, with_regex(path, stop_regex))
    assert answer.status == 400
    param = "sampling_params.stop_regex" if path == GENERATE else "stop_regex"
    assert (answer.error["param"], answer.error["code"]) == (param, "invalid_value")
    assert message in answer.error["message"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stop_regex", [5, {"a": 1}, ["a", 5], [None], True])
def test_a_regex_of_the_wrong_type_is_refused(shared_server: LiveServer, path: str, stop_regex: Any) -> None:
    answer = shared_server.post(path, with_regex(path, stop_regex))
    assert (answer.status, answer.error["code"]) == (400, "invalid_type")
    assert "stop_regex" in answer.error["param"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("stop_regex", "taken"), [("a+b", ("a+b",)), (["x", "y"], ("x", "y")), ([], ()), (None, ())])
def test_a_regex_or_several_reach_the_scheduler(
    server: LiveServer, path: str, stop_regex: Any, taken: tuple[str, ...]
) -> None:
    assert server.post(path, with_regex(path, stop_regex)).status == 200
    assert server.backend.requests[0].sampling_params.stop_regex == taken


def test_an_answer_tells_the_pattern_that_ended_it(server: LiveServer) -> None:
    pattern = r"[bh].?"
    choice = server.post(COMPLETIONS, with_regex(COMPLETIONS, pattern)).json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("a", "stop", pattern)
    choice = server.post(CHAT, with_regex(CHAT, pattern)).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["matched_stop"]) == ("u:", "stop", pattern)
    answer = server.post(GENERATE, with_regex(GENERATE, pattern)).json
    assert (answer["text"], answer["meta_info"]["finish_reason"]) == ("a", {"type": "stop", "matched": pattern})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_last_chunk_of_a_stream_tells_the_pattern(server: LiveServer, path: str) -> None:
    *chunks, last, done = server.events(path, with_regex(path, "[bh]", stream=True))
    assert (last["choices"][0]["finish_reason"], last["choices"][0]["matched_stop"]) == ("stop", "[bh]")
    assert done == "[DONE]"
    assert not any(chunk["choices"][0].get("matched_stop") for chunk in chunks)


def test_every_part_of_a_batch_is_checked_and_named(shared_server: LiveServer) -> None:
    params = [{"stop_regex": "a"}, {"stop_regex": "("}]
    answer = shared_server.post(GENERATE, {"text": ["a", "b"], "sampling_params": params})
    assert answer.error["param"] == "sampling_params[1].stop_regex"
