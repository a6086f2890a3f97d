"""Log-probabilities in every API's shape: fields, bounds, streams, split characters. The backend's are made up."""

from typing import Any

import pytest

from millstream.tokenizer_manager.api import completion_choice, generate_service
from millstream.tokenizer_manager.chat import chat_generation
from tests.tokenizer_manager.live_server import END_ID, LiveServer

CHAT, COMPLETION, GENERATE, SCORE = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/score"
HI = [{"role": "user", "content": "hi"}]


def entry(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def test_chat_has_tokens_bytes_and_the_likeliest(shared_server: LiveServer) -> None:
    body = {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    choice = shared_server.post(CHAT, body).json["choices"][0]
    best = [entry("A", 0.0), entry("B", -1.0)]
    content = [
        {**entry("u", -7.0), "top_logprobs": best},
        {**entry(":", -8.0), "top_logprobs": best},
    ]
    assert choice["logprobs"] == {"content": content, "refusal": None}
    events = shared_server.events(CHAT, {**body, "stream": True})[:-1]
    streamed = [event["choices"][0]["logprobs"] for event in events]
    assert [each for logprobs in streamed if logprobs for each in logprobs["content"]] == content


def test_chat_has_none_unless_they_are_asked_for(shared_server: LiveServer) -> None:
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": 0}):
        answer = shared_server.post(CHAT, {"messages": HI, "max_tokens": 2, **fields})
        assert answer.json["choices"][0]["logprobs"] is None
    alone = shared_server.post(CHAT, {"messages": HI, "max_tokens": 1, "logprobs": True}).json["choices"][0]
    assert alone["logprobs"]["content"] == [{**entry("u", -7.0), "top_logprobs": []}]


def test_many_are_the_same_as_few(shared_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would hold up the event loop is written in a thread."""
    requests = [
        (CHAT, {"messages": HI, "max_tokens": 9, "logprobs": True, "top_logprobs": 3}),
        (COMPLETION, {"prompt": "abc", "max_tokens": 9, "logprobs": 2, "echo": True}),
        (GENERATE, {"text": "abc", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}),
    ]
    few = [found_in(shared_server.post(*request).json) for request in requests]
    for module in (chat_generation, completion_choice, generate_service):
        monkeypatch.setattr(module, "MANY_LOGPROBS", 0)
    assert [found_in(shared_server.post(*request).json) for request in requests] == few
    assert all(few)


def found_in(answer: Any) -> list[Any]:
    """The log-probabilities of an answer."""
    if "choices" in answer:
        return [choice["logprobs"] for choice in answer["choices"]]
    return [value for name, value in answer["meta_info"].items() if "logprob" in name]


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_a_split_character_add_up(shared_server: LiveServer, stream: bool) -> None:
    """Its tokens come with it."""
    body = {"messages": [{"role": "user", "content": "é🌍"}], "max_tokens": 9, "logprobs": True, "stream": stream}
    if stream:
        events = shared_server.events(CHAT, body)[:-1]
        found = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
        entries = [each for logprobs in found for each in logprobs["content"]]
        assert [len(logprobs["content"]) for logprobs in found] == [1, 1, 2, 4, 1]
    else:
        entries = shared_server.post(CHAT, body).json["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in entries) == "u:é🌍\n".encode()
    assert [each["token"] for each in entries] == ["u", ":", *["\ufffd"] * 6, "\n"]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_have_columns_and_offsets(shared_server: LiveServer, stream: bool) -> None:
    body = {"prompt": "aé", "max_tokens": 4, "logprobs": 1, "stream": stream}
    assert read(shared_server, body) == (
        "aéa",
        {
            "tokens": ["a", "\ufffd", "\ufffd", "a"],
            "token_logprobs": [-3.0, -4.0, -5.0, -6.0],
            "top_logprobs": [
                {"A": 0.0, text: logprob} for text, logprob in zip("a\ufffd\ufffda", (-3, -4, -5, -6), strict=True)
            ],
            "text_offset": [0, 1, 1, 2],
        },
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
def test_an_echo_begins_with_the_prompt(shared_server: LiveServer, prompt: Any, stream: bool) -> None:
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 0, "echo": True, "stream": stream}
    text, logprobs = read(shared_server, body)
    assert text == "aba"
    assert logprobs == {
        "tokens": ["a", "b", "a"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"b": -1.0}, {"a": -2.0}],
        "text_offset": [0, 1, 2],
    }
    assert read(shared_server, {**body, "logprobs": None})[0] == "aba"


def test_outputs_begin_behind_a_character_that_the_prompt_cuts(shared_server: LiveServer) -> None:
    text, logprobs = read(shared_server, {"prompt": [97, 0xC3], "max_tokens": 1, "logprobs": 0, "echo": True})
    assert text == "a\ufffda"
    assert logprobs["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_may_be_all(shared_server: LiveServer, stream: bool) -> None:
    body = {"prompt": ["ab", "xyz"], "max_tokens": 0, "logprobs": 1, "echo": True}
    choices = shared_server.post(COMPLETION, body).json["choices"]
    assert [choice["text"] for choice in choices] == ["ab", "xyz"]
    assert [choice["logprobs"]["token_logprobs"] for choice in choices] == [[None, -1.0], [None, -1.0, -2.0]]
    assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
    assert read(shared_server, {**body, "prompt": "q", "stream": stream})[1]["tokens"] == ["q"]


def test_each_of_n_answers_has_its_own_and_the_echo(shared_server: LiveServer) -> None:
    body = {"prompt": ["ab", "x"], "max_tokens": 1, "logprobs": 0, "echo": True, "n": 2}
    choices = shared_server.post(COMPLETION, body).json["choices"]
    assert [choice["text"] for choice in choices] == ["aba", "aba", "xx", "xx"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [3, 3, 2, 2]


def read(server: LiveServer, body: dict[str, Any]) -> tuple[str, Any]:
    """Text and log-probabilities of the one choice."""
    if not body.get("stream"):
        answer = server.post(COMPLETION, body)
        assert answer.status == 200, answer.body
        choice = answer.json["choices"][0]
        return choice["text"], choice["logprobs"]
    choices = [event["choices"][0] for event in server.events(COMPLETION, body)[:-1]]
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    joined = {name: [item for each in found for item in each[name]] for name in found[0]} if found else None
    return "".join(choice["text"] for choice in choices), joined


def test_generate_has_sglangs_lists(shared_server: LiveServer) -> None:
    body = {
        "text": "abc",
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "token_ids_logprob": [5, 6],
        "return_text_in_logprobs": True,
    }
    best, asked = [[0.0, 65, "A"]], [[-5.0, 5, "\x05"], [-6.0, 6, "\x06"]]
    expected = {
        "input_token_logprobs": [[None, 97, "a"], [-1.0, 98, "b"], [-2.0, 99, "c"]],
        "input_top_logprobs": [None, best, best],
        "input_token_ids_logprobs": [None, asked, asked],
        "output_token_logprobs": [[-3.0, 97, "a"], [-4.0, 98, "b"]],
        "output_top_logprobs": [best, best],
        "output_token_ids_logprobs": [asked, asked],
    }
    whole = shared_server.post(GENERATE, body).json["meta_info"]
    assert {name: whole[name] for name in expected} == expected
    last = shared_server.events(GENERATE, {**body, "stream": True})[-2]["meta_info"]
    assert {name: last[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("start", "expected"),
    [(None, []), (-1, []), (3, []), (2, [[None, 99, None]]), (1, [[None, 98, None], [-2.0, 99, None]])],
)
def test_generate_starts_where_it_is_told(shared_server: LiveServer, start: int | None, expected: list[Any]) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": start}
    meta = shared_server.post(GENERATE, body).json["meta_info"]
    assert meta["input_token_logprobs"] == expected
    assert meta["output_token_logprobs"] == []
    assert "input_top_logprobs" not in meta


def test_generate_takes_one_value_or_one_for_each_prompt(shared_server: LiveServer) -> None:
    body = {
        "text": ["ab", "x"],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": [True, False],
        "top_logprobs_num": [2, 0],
        "token_ids_logprob": [[7], [8]],
    }
    first, second = (answer["meta_info"] for answer in shared_server.post(GENERATE, body).json)
    assert [len(first["output_top_logprobs"][0]), first["output_token_ids_logprobs"][0][0][1]] == [2, 7]
    assert not [name for name in second if "logprob" in name]


def test_scores_are_probabilities(shared_server: LiveServer) -> None:
    body = {"query": "is", "items": ["a", "b"], "label_token_ids": [1, 2], "apply_softmax": True}
    answer = shared_server.post(SCORE, body).json
    assert answer["scores"][0] == answer["scores"][1] == pytest.approx([0.7310586, 0.2689414])
    assert (answer["object"], answer["usage"]["completion_tokens"]) == ("scoring", 0)
    assert shared_server.backend.prompt_texts()[-2:] == ["isa", "isb"]
    shared_server.post(SCORE, {**body, "item_first": True})
    assert shared_server.backend.prompt_texts()[-2:] == ["ais", "bis"]


BAD = [
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": top}, "top_logprobs") for top in (-1, 21, 1_000_000, "2")
]
BAD += [
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HI, "logprobs": 2}, "logprobs"),
    (CHAT, {"messages": HI, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HI, "prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETION, {"prompt": "a", "logprobs": 6}, "logprobs"),
    (COMPLETION, {"prompt": "a", "logprobs": -1}, "logprobs"),
    (COMPLETION, {"prompt": "a", "logprobs": True}, "logprobs"),
    (COMPLETION, {"prompt": "a", "echo": 1}, "echo"),
    (COMPLETION, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (COMPLETION, {"prompt": "a", "max_tokens": 0, "echo": False}, "max_tokens"),
    (SCORE, {"query": "a", "items": [], "label_token_ids": [1]}, "items"),
    (SCORE, {"query": "a", "items": ["b"], "label_token_ids": []}, "label_token_ids"),
    (SCORE, {"query": "a", "items": ["b"], "label_token_ids": [END_ID + 1]}, "label_token_ids"),
    (SCORE, {"query": "a", "items": ["b"], "label_token_ids": [1] * 1025}, "label_token_ids"),
    (SCORE, {"query": "a", "items": [[1]], "label_token_ids": [1]}, "items"),
    (SCORE, {"query": "a", "items": ["b"]}, "label_token_ids"),
]
BAD += [
    (GENERATE, {"text": "abc", "return_logprob": True, **fields}, next(iter(fields)))
    for fields in (
        {"logprob_start_len": 4},
        {"logprob_start_len": -2},
        {"logprob_start_len": [0, 0]},
        {"top_logprobs_num": 21},
        {"top_logprobs_num": -1},
        {"top_logprobs_num": 10**9},
        {"token_ids_logprob": [END_ID + 1]},
        {"token_ids_logprob": [-1]},
        {"token_ids_logprob": [1] * 1025},
        {"token_ids_logprob": [[1], [2]]},
        {"token_ids_logprob": [[1], 2]},
        {"return_logprob": 1},
    )
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_what_is_out_of_range_is_named(shared_server: LiveServer, path: str, body: dict[str, Any], param: str) -> None:
    answer = shared_server.post(path, body)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert param in answer.error["message"]


def test_a_call_may_not_ask_for_more_than_memory_should_hold(shared_server: LiveServer) -> None:
    body = {
        "text": ["abc"] * 100,
        "sampling_params": {"max_new_tokens": 200},
        "return_logprob": True,
        "token_ids_logprob": [1] * 200,
    }
    answer = shared_server.post(GENERATE, body)
    assert answer.status == 400
    assert "log-probabilities" in answer.error["message"]
    assert shared_server.post(GENERATE, {**body, "text": ["abc"] * 2}).status == 200
