"""POST /v1/chat/completions: framing, usage, what reaches the scheduler."""

from typing import Any

import openai
import pytest

from tests.tokenizer_manager.live_server import CONTEXT_LEN, END_ID, MODEL, LiveServer

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]  # renders to the 7 tokens of "u:hi\na:"


def test_a_stream_is_a_role_chunk_then_deltas_then_a_finish_chunk_then_done(server: LiveServer) -> None:
    events = server.events(PATH, {"model": MODEL, "messages": HELLO, "max_tokens": 3, "stream": True})
    assert events.pop() == "[DONE]"
    assert [event["choices"] for event in events] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "u"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": ":"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "h"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "matched_stop": None}],
    ]
    heads = [{key: value for key, value in event.items() if key != "choices"} for event in events]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["id"].startswith("chatcmpl-")
    assert heads[0]["object"] == "chat.completion.chunk"
    assert heads[0]["model"] == MODEL
    assert "usage" not in heads[0]


def test_a_stream_ends_with_usage_only_when_asked(server: LiveServer) -> None:
    server.backend.num_cached = 5
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = server.events(PATH, {"messages": HELLO, "max_tokens": 2, **options})
    assert events[-1] == "[DONE]"
    assert [event["usage"] for event in events[:-2]] == [None] * (len(events) - 2)
    assert events[-2]["choices"] == []
    assert events[-2]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize(("path", "body"), [(PATH, {"messages": HELLO}), ("/v1/completions", {"prompt": "u:hi\na:"})])
def test_every_chunk_has_the_usage_so_far_where_that_is_asked(
    server: LiveServer, path: str, body: dict[str, Any]
) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events = server.events(path, body | {"max_tokens": 3, **options})
    text = ""
    for event in events[:-2]:
        choice = event["choices"][0]
        text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        assert event["usage"]["prompt_tokens"] == 7
        assert len(text) <= event["usage"]["completion_tokens"] <= 3
        assert event["usage"]["total_tokens"] == 7 + event["usage"]["completion_tokens"]
    assert events[-3]["usage"]["completion_tokens"] == events[-2]["usage"]["completion_tokens"] == 3


def test_a_whole_answer_has_the_message_and_the_usage(server: LiveServer) -> None:
    answer = server.post(PATH, {"messages": HELLO, "max_tokens": 4})
    assert answer.status == 200
    assert answer.json["object"] == "chat.completion"
    assert answer.json["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "u:hi", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "matched_stop": None,
        }
    ]
    assert answer.json["usage"]["total_tokens"] == 11


def test_the_openai_client_reads_streams_and_whole_answers(server: LiveServer) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client:
        chunks = list(
            client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "hi"}],
                max_completion_tokens=4,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "u:hi"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 4
        whole = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], stop="h")
        assert whole.choices[0].message.content == "u:"
        assert whole.choices[0].finish_reason == "stop"
        with pytest.raises(openai.NotFoundError) as error:
            client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
        assert error.value.code == "model_not_found"
        assert error.value.param == "model"


def test_what_stopped_the_text_is_told(server: LiveServer) -> None:
    by_text = server.post(PATH, {"messages": HELLO, "stop": ["zz", "hi"]}).json["choices"][0]
    assert (by_text["finish_reason"], by_text["matched_stop"]) == ("stop", "hi")
    by_token = server.post(PATH, {"messages": HELLO, "stop_token_ids": [ord("i")]}).json["choices"][0]
    assert (by_token["finish_reason"], by_token["matched_stop"]) == ("stop", ord("i"))


def test_without_a_limit_the_rest_of_the_context_may_be_filled(server: LiveServer) -> None:
    server.post(PATH, {"messages": HELLO})
    assert server.backend.requests[0].sampling_params.max_new_tokens == CONTEXT_LEN - 7


def test_a_limit_beyond_the_context_is_clamped(server: LiveServer) -> None:
    answer = server.post(PATH, {"messages": HELLO, "max_tokens": 10**9, "min_tokens": 10**8})
    assert answer.status == 200
    params = server.backend.requests[0].sampling_params
    assert (params.max_new_tokens, params.min_new_tokens) == (CONTEXT_LEN - 7, CONTEXT_LEN - 7)


def test_every_sampling_field_reaches_the_scheduler(server: LiveServer) -> None:
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": -7,
        "min_tokens": 1,
        "max_tokens": 2,
        "stop": "x",
        "stop_token_ids": [5],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
        "no_stop_trim": True,
        "priority": 0,
        "cache_salt": "tenant",
    }
    assert server.post(PATH, {"messages": HELLO, **body}).status == 200
    request = server.backend.requests[0]
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 40, 0.1)
    assert (params.seed, params.min_new_tokens, params.max_new_tokens) == (-7, 1, 2)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == (("x",), (5,), True)
    assert (params.skip_special_tokens, params.no_stop_trim) == (False, True)
    assert (request.cache_salt, request.eos_token_ids) == ("tenant", (END_ID,))


@pytest.mark.parametrize(("path", "body"), [(PATH, {"messages": HELLO}), ("/generate", {"text": "a"})])
def test_sglangs_extra_key_is_a_cache_salt(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    assert server.post(path, body | {"extra_key": "mine"}).status == 200
    assert server.backend.requests[0].cache_salt == "mine"


def test_vllms_name_keeps_the_stop_string_too(server: LiveServer) -> None:
    server.post(PATH, {"messages": HELLO, "max_tokens": 1, "stop": "x", "include_stop_str_in_output": True})
    assert server.backend.requests[0].sampling_params.no_stop_trim


def test_a_missing_seed_is_drawn_and_differs_between_requests(server: LiveServer) -> None:
    for _ in range(2):
        server.post(PATH, {"messages": HELLO, "max_tokens": 1})
    seeds = [request.sampling_params.seed for request in server.backend.requests]
    assert None not in seeds
    assert seeds[0] != seeds[1]


def test_content_may_be_parts_of_text(server: LiveServer) -> None:
    content = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    answer = server.post(PATH, {"messages": [{"role": "user", "content": content}], "max_tokens": 5})
    assert answer.json["choices"][0]["message"]["content"] == "u:h\ni"


def test_a_final_message_can_be_continued(server: LiveServer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "o"}]
    server.post(PATH, {"messages": messages, "continue_final_message": True, "max_tokens": 1})
    prompt = server.backend.requests[0].input_ids[::4].decode()
    assert prompt == "u:hi\na:o"


def test_a_seeded_stream_and_whole_answer_have_the_same_text(server: LiveServer) -> None:
    events = server.events(PATH, {"messages": HELLO, "max_tokens": 9, "stream": True})
    text = "".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1])
    whole = server.post(PATH, {"messages": HELLO, "max_tokens": 9}).json
    assert text == whole["choices"][0]["message"]["content"] == "u:hi\na:u:"
