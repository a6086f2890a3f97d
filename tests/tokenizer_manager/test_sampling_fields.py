"""Sampling fields: what reaches the scheduler, over which defaults; and several answers to one prompt."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from millstream.common.flags import ConfigError
from millstream.common.sampling_params import SamplingParams
from millstream.tokenizer_manager.api.sampling_fields import ReadOnce
from millstream.tokenizer_manager.sampling_defaults import describe_sampling_defaults, find_sampling_defaults
from tests.tokenizer_manager.live_server import Answer, LiveServer

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "hello"}]
FIELDS: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": -0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {"65": -100, "66": 2.5},
    "bad_words": ["no", " way"],
    "spaces_between_special_tokens": False,
    "temperature": 0.5,
    "top_k": 7,
    "seed": 11,
}
BAD_WORDS = tuple(tuple(word.encode()) for word in ("no", " no", "way", " way"))


def sent(server: LiveServer, path: str, body: dict[str, Any]) -> SamplingParams:
    """The params of the one request that a call leads to."""
    before = len(server.backend.requests)
    answer = server.post(path, body)
    assert answer.status == 200, answer.body
    (request,) = server.backend.requests[before:]
    return request.sampling_params


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "max_tokens": 2, **FIELDS}),
        (COMPLETIONS, {"prompt": "ab", "max_tokens": 2, **FIELDS}),
        (GENERATE, {"text": "ab", "sampling_params": {"max_new_tokens": 2, **FIELDS}}),
    ],
)
def test_every_sampling_field_reaches_the_scheduler(shared_server: LiveServer, path: str, body: dict[str, Any]) -> None:
    params = sent(shared_server, path, body)
    expected = {**FIELDS, "logit_bias": {65: -100.0, 66: 2.5}, "bad_words": BAD_WORDS}
    assert {name: getattr(params, name) for name in FIELDS} == expected


def test_the_models_defaults_hold_where_a_request_says_nothing_and_not_for_sglangs_route() -> None:
    defaults = SamplingParams(temperature=0.25, top_k=20, repetition_penalty=1.1)
    with LiveServer(sampling_defaults=defaults) as server:
        plain = sent(server, CHAT, {"messages": HELLO, "max_tokens": 1})
        assert (plain.temperature, plain.top_k, plain.repetition_penalty) == (0.25, 20, 1.1)
        own = sent(server, COMPLETIONS, {"prompt": "a", "max_tokens": 1, "temperature": 0.75, "top_k": -1})
        assert (own.temperature, own.top_k, own.repetition_penalty) == (0.75, -1, 1.1)
        sglang = sent(server, GENERATE, {"text": "a", "sampling_params": {"max_new_tokens": 1}})
        assert (sglang.temperature, sglang.top_k, sglang.repetition_penalty) == (1.0, -1, 1.0)


def test_defaults_come_from_generation_config_unless_openais_are_asked_for(tmp_path: Path) -> None:
    assert find_sampling_defaults(tmp_path, "model") == SamplingParams()
    config = (
        '{"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 2048, "do_sample": true, "min_p": null}'
    )
    (tmp_path / "generation_config.json").write_text(config)
    found = find_sampling_defaults(tmp_path, "model")
    assert found == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert describe_sampling_defaults(found) == "temperature 0.6, top_p 0.95, top_k 20"
    assert describe_sampling_defaults(find_sampling_defaults(tmp_path, "openai")) == "OpenAI's"


@pytest.mark.parametrize(("name", "of_index"), [("bad_words", "w{}x"), ("stop_regex", "w{}x+")])
def test_a_batch_brings_few_different_lists_that_take_time(shared_server: LiveServer, name: str, of_index: str) -> None:
    def post(num_different: int) -> Answer:
        lists = [[of_index.format(index % num_different), "b"] for index in range(200)]
        params = [{"max_new_tokens": 1, name: each} for each in lists]
        return shared_server.post(GENERATE, {"text": ["a"] * 200, "sampling_params": params})

    assert post(32).status == 200
    refused = post(33)
    assert refused.status == 400
    assert refused.error["param"] == f"sampling_params[32].{name}"
    assert "at most 32 different" in refused.error["message"]


def test_a_list_that_comes_again_is_not_read_again() -> None:
    was_read = []
    once = ReadOnce(was_read.append)
    for texts in [("a", "b"), ("c",), ("a", "b")] * 50:
        once(texts, "bad_words")
    assert was_read == [("a", "b"), ("c",)]


@pytest.mark.parametrize("text", ['{"temperature": -1}', '{"top_p": "x"}', "[", '{"temperature": NaN}'])
def test_a_generation_config_that_can_not_be_used_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config.json: .*--sampling-defaults openai"):
        find_sampling_defaults(tmp_path, "model")


# ---- several answers ---------------------------------------------------------------------------------------------------


def test_a_chat_with_n_gives_so_many_choices_and_counts_its_prompt_once(shared_server: LiveServer) -> None:
    one = shared_server.post(CHAT, {"messages": HELLO, "max_tokens": 4}).json
    three = shared_server.post(CHAT, {"messages": HELLO, "max_tokens": 4, "n": 3, "best_of": 3}).json
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert [choice["message"] for choice in three["choices"]] == [one["choices"][0]["message"]] * 3
    assert three["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert three["usage"]["completion_tokens"] == 3 * 4


def test_the_scheduler_gets_one_message_for_all_answers(shared_server: LiveServer) -> None:
    assert sent(shared_server, CHAT, {"messages": HELLO, "max_tokens": 1, "n": 5}).n == 5


def test_a_stream_with_n_interleaves_choices_that_add_up(shared_server: LiveServer) -> None:
    body = {"messages": HELLO, "max_tokens": 5, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *events, last, done = shared_server.events(CHAT, body)
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    whole = shared_server.post(CHAT, {"messages": HELLO, "max_tokens": 5}).json
    assert texts == dict.fromkeys((0, 1), whole["choices"][0]["message"]["content"])
    assert (reasons, done) == ({0: "length", 1: "length"}, "[DONE]")
    assert last["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert last["usage"]["completion_tokens"] == 10


def test_completions_number_their_choices_by_prompt_and_answer(shared_server: LiveServer) -> None:
    body = {"prompt": ["ab", "xyz"], "n": 2, "max_tokens": 3, "echo": True}
    answer = shared_server.post(COMPLETIONS, body).json
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["ababa", "ababa", "xyzxyz", "xyzxyz"]
    assert answer["usage"]["prompt_tokens"] == 5


def test_generate_gives_a_list_for_several_answers_with_ids_of_their_own(shared_server: LiveServer) -> None:
    body = {"text": "ab", "rid": "mine", "sampling_params": {"n": 2, "max_new_tokens": 3}}
    answers = shared_server.post(GENERATE, body).json
    assert [answer["text"] for answer in answers] == ["aba", "aba"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["mine-0", "mine-1"]
    events = shared_server.events(GENERATE, {**body, "stream": True})
    assert {event["index"] for event in events[:-1]} == {0, 1}


@pytest.mark.parametrize("name", ["mine", "mine-1"])
def test_an_abort_by_the_clients_id_ends_all_answers_and_by_an_answers_id_that_one(name: str) -> None:
    with LiveServer() as server:
        server.backend.paused = True
        body = {"text": "ab", "rid": "mine", "sampling_params": {"n": 2, "max_new_tokens": 3}}
        connection = server.send("POST", GENERATE, body)
        with connection:
            server.until(lambda: server.backend.num_running == 2)
            assert server.post("/abort_request", {"rid": name}).status == 200
            server.until(lambda: server.backend.num_running == (0 if name == "mine" else 1))
            server.call(server.backend.resume)
            whole = json.loads(connection.getresponse().read())
            answers = [answer["meta_info"]["finish_reason"]["type"] for answer in whole]
        assert answers == (["abort", "abort"] if name == "mine" else ["length", "abort"])


def test_metrics_count_the_prompt_once() -> None:
    with LiveServer() as server:
        server.post(COMPLETIONS, {"prompt": "abcd", "n": 3, "max_tokens": 2})
        assert server.metric("prompt_tokens_total") == 4
        assert server.metric("generation_tokens_total") == 6
        assert server.call(lambda: server.manager.num_inflight) == 0


def test_every_answer_is_explained_by_the_clients_id_and_one_by_its_own(shared_server: LiveServer) -> None:
    body = {"text": "ab", "rid": "told", "sampling_params": {"n": 2, "max_new_tokens": 1}}
    assert shared_server.post(GENERATE, body).status == 200
    both = shared_server.request("GET", "/debug/requests/told").json
    assert sorted(each["label"] for each in both["requests"]) == ["told-0", "told-1"]
    assert shared_server.request("GET", "/debug/requests/told-1").json["label"] == "told-1"


def test_an_id_of_an_answer_in_flight_is_not_given_twice() -> None:
    with LiveServer() as server:
        server.backend.paused = True
        params = {"n": 2, "max_new_tokens": 1}
        with server.send("POST", GENERATE, {"text": "ab", "rid": "mine", "sampling_params": params}) as connection:
            server.until(lambda: server.backend.num_running == 2)
            for rid in ("mine", "mine-1"):
                refused = server.post(GENERATE, {"text": "ab", "rid": rid})
                assert (refused.status, refused.error["code"]) == (400, "duplicate_request_id")
            server.call(server.backend.resume)
            assert connection.getresponse().status == 200
