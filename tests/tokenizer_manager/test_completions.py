"""POST /v1/completions: prompts of every kind, batches, framing."""

from typing import Any

import openai
import pytest

from tests.tokenizer_manager.live_server import MODEL, LiveServer

PATH = "/v1/completions"


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("abc", ["ab"]),
        (["abc", "xyz", "12"], ["ab", "xy", "12"]),
        ([97, 98, 99], ["ab"]),
        ([[97, 98], [120]], ["ab", "xx"]),
    ],
)
def test_a_prompt_is_a_text_or_ids_single_or_batch(server: LiveServer, prompt: Any, expected: list[str]) -> None:
    answer = server.post(PATH, {"prompt": prompt, "max_tokens": 2})
    assert answer.status == 200
    assert answer.json["object"] == "text_completion"
    assert answer.json["id"].startswith("cmpl-")
    assert texts(answer.json) == expected
    assert answer.json["usage"]["completion_tokens"] == 2 * len(expected)


def test_the_default_length_is_16_tokens(server: LiveServer) -> None:
    assert texts(server.post(PATH, {"prompt": "a"}).json) == ["a" * 16]


def test_usage_of_a_batch_is_the_sum_over_its_prompts(server: LiveServer) -> None:
    server.backend.num_cached = 1
    usage = server.post(PATH, {"prompt": ["abc", "xy"], "max_tokens": 3}).json["usage"]
    assert usage == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stream_ends_each_choice_once_and_the_last_chunk_of_each_has_the_reason(server: LiveServer) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = server.events(PATH, {"prompt": ["ab", "xyz"], "max_tokens": 3, "stop": "z", **options})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 6
    choices = [event["choices"][0] for event in events[:-2]]
    for index, text, reason, matched in ((0, "aba", "length", None), (1, "xy", "stop", "z")):
        own = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in own) == text
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + [reason]
        assert own[-1]["matched_stop"] == matched
        assert all(choice["logprobs"] is None for choice in own)


def test_the_openai_client_reads_a_stream(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(model=MODEL, prompt="hey", max_tokens=5, stream=True)
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "heyhe"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_a_batch_with_a_label_numbers_its_requests(server: LiveServer) -> None:
    answer = server.request("POST", PATH, {"prompt": ["a", "b"], "max_tokens": 1}, {"X-Request-Id": "mine"})
    assert answer.headers["X-Request-Id"] == "mine"
    rids = [request.rid for request in server.backend.requests]
    assert [rid.startswith(f"mine-{index}-") for index, rid in enumerate(rids)] == [True, True]
    assert len(set(rids)) == 2
