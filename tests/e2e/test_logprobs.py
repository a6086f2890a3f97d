"""Log-probabilities of the served model are transformers', whatever cache, chunks, ranks, retraction and streaming do."""

import json
import math
from typing import Any

import openai
import pytest
import requests

from tests.e2e.make_logprobs import LABELS, PromptLogprobs, load_logprobs
from tests.e2e.server_process import EXACT_FLAGS, ServerProcess, serving, wait_until

TOLERANCE = 1e-4
REFERENCES = load_logprobs()
PROMPTS = [reference.prompt_ids for reference in REFERENCES]
NUM_OUTPUTS = 8


@pytest.fixture(scope="module")
def server(exact_server: ServerProcess) -> ServerProcess:
    return exact_server


def ask(server: ServerProcess, ids: list[int], start_len: int = 0, **fields: Any) -> dict[str, Any]:
    """What /generate says of a prompt and some greedy outputs."""
    response = post(server, ids, logprob_start_len=start_len, **fields)
    if fields.get("stream"):
        return dict(json.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["meta_info"])
    return dict(response.json()["meta_info"])


def ask_all(server: ServerProcess, prompts: list[list[int]], **fields: Any) -> list[dict[str, Any]]:
    """The same of several prompts at once."""
    return [answer["meta_info"] for answer in post(server, prompts, logprob_start_len=0, **fields).json()]


def post(server: ServerProcess, input_ids: Any, **fields: Any) -> requests.Response:
    params = {"max_new_tokens": NUM_OUTPUTS, "temperature": 0, "ignore_eos": True, **fields.pop("params", {})}
    wanted = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": LABELS}
    response = server.post("/generate", {"input_ids": input_ids, "sampling_params": params, **wanted, **fields})
    assert response.status_code == 200, response.text
    return response


def numbers(items: list[Any]) -> list[float]:
    """The log-probabilities in lists of any depth; NaN where there is none."""
    if items is None or (items and not isinstance(items[0], list)):
        return [math.nan if items is None or items[0] is None else items[0]]
    return [number for item in items for number in numbers(item)]


def flat(rows: list[list[float]]) -> list[float]:
    return [each for row in rows for each in row]


def check_prompt(meta: dict[str, Any], start: int, expected: PromptLogprobs) -> None:
    """Compare what is said of the prompt with transformers."""
    ids = expected.prompt_ids
    own, top, asked = (meta[f"input_{kind}_logprobs"] for kind in ("token", "top", "token_ids"))
    assert [item[1] for item in own] == ids[start:]
    assert own[0] == [None, ids[start], None]
    assert top[0] is None
    assert asked[0] is None
    assert numbers(own[1:]) == pytest.approx(expected.own[start:], abs=TOLERANCE)
    assert numbers(top[1:]) == pytest.approx(flat(expected.top[start:-1]), abs=TOLERANCE)
    assert numbers(asked[1:]) == pytest.approx(flat(expected.labels[start:-1]), abs=TOLERANCE)
    assert all([item[1] for item in items] == list(LABELS) for items in asked[1:])


def check_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two answers say the same of outputs and, where both speak of it, of the prompt."""
    for side in ("input", "output"):
        for kind in ("token", "top", "token_ids"):
            mine, other = (numbers(meta[f"{side}_{kind}_logprobs"]) for meta in (ours, theirs))
            assert mine == pytest.approx(other, abs=TOLERANCE, nan_ok=True)


def test_prompts_and_outputs_are_transformers(server: ServerProcess) -> None:
    for reference in REFERENCES:
        meta = ask(server, reference.prompt_ids)
        check_prompt(meta, 0, reference)
        assert numbers(meta["output_top_logprobs"][0]) == pytest.approx(reference.top[-1], abs=TOLERANCE)
        assert numbers(meta["output_token_ids_logprobs"][0]) == pytest.approx(reference.labels[-1], abs=TOLERANCE)
        assert len(meta["output_token_logprobs"]) == NUM_OUTPUTS


def test_cache_hits_streams_and_start_positions_make_no_difference(server: ServerProcess) -> None:
    reference = REFERENCES[-1]
    ids = reference.prompt_ids
    first = ask(server, ids)
    for start in (16, 33, len(ids) - 1):
        meta = ask(server, ids, start)
        check_prompt(meta, start, reference)
        assert meta["cached_tokens"] == start // 16 * 16
        tops = [each["output_top_logprobs"] for each in (meta, first)]
        assert numbers(tops[0]) == pytest.approx(numbers(tops[1]), abs=TOLERANCE)
    check_same(ask(server, ids, stream=True), first)
    none = ask(server, ids, -1)
    assert none["input_token_logprobs"] == []
    assert none["cached_tokens"] > 0


def test_a_prompt_alone_has_no_outputs(server: ServerProcess) -> None:
    ids = PROMPTS[0]
    meta = ask(server, ids, params={"max_new_tokens": 0})
    assert meta["completion_tokens"] == 0
    assert meta["output_token_logprobs"] == []
    assert len(meta["input_token_logprobs"]) == len(ids)
    assert meta["finish_reason"] == {"type": "length", "length": 0}


def test_chunks_retraction_and_ranks_make_no_difference(server: ServerProcess) -> None:
    """The second server's cache holds little more than the prompts, so that requests are retracted half-way."""
    many, prompts = {"max_new_tokens": 20, "ignore_eos": False}, PROMPTS[:4]
    expected = [ask(server, ids, params=many) for ids in prompts]
    num_tokens = sum(map(len, prompts))
    tight = ("--max-total-tokens", str(num_tokens + 40), "--page-size", "1", "--schedule-conservativeness", "0")
    with serving("smollm2", *EXACT_FLAGS, *tight, "--tp-size", "2", "--chunked-prefill-size", "48") as other:
        found = ask_all(other, prompts, params=many)
        wait_until(lambda: other.metric("millstream_num_retracted_requests_total") > 0, 10, "a request was retracted")
    for ours, theirs in zip(found, expected, strict=True):
        check_same(ours, theirs)


def test_scores_are_the_probabilities_of_the_next_token(server: ServerProcess) -> None:
    ids, labels = PROMPTS[1], REFERENCES[1].labels[-1]
    body = {"query": ids[:9], "items": [ids[9:], ids[9:12]], "label_token_ids": LABELS}
    plain = server.post("/v1/score", body).json()
    assert plain["object"] == "scoring"
    assert plain["scores"][0] == pytest.approx([math.exp(each) for each in labels], rel=1e-3)
    assert len(plain["scores"]) == 2
    assert plain["usage"] == {"prompt_tokens": len(ids) + 12, "completion_tokens": 0, "total_tokens": len(ids) + 12}
    soft = server.post("/v1/score", {**body, "apply_softmax": True, "items": [ids[9:]]}).json()
    total = sum(map(math.exp, labels))
    assert soft["scores"][0] == pytest.approx([math.exp(each) / total for each in labels], rel=1e-3)
    swapped = server.post("/v1/score", {**body, "query": ids[9:], "items": [ids[:9]], "item_first": True}).json()
    assert swapped["scores"][0] == pytest.approx(plain["scores"][0], rel=1e-3)


def test_openai_clients_read_both_shapes(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        check_completions(client)
        check_chat(client)


def check_completions(client: openai.OpenAI) -> None:
    text = "The quick brown fox"
    whole = client.completions.create(model="smollm2", prompt=text, max_tokens=4, temperature=0, echo=True, logprobs=2)
    found = whole.choices[0].logprobs
    assert "".join(found.tokens) == whole.choices[0].text
    assert found.token_logprobs[0] is None
    assert [
        whole.choices[0].text[at:].startswith(token) for at, token in zip(found.text_offset, found.tokens, strict=True)
    ]
    scored = client.completions.create(model="smollm2", prompt=text, max_tokens=0, echo=True, logprobs=1)
    assert scored.choices[0].text == text
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(found.token_logprobs[1:4], abs=1e-3)


def check_chat(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Say hello"}],
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 3,
    }
    chat = client.chat.completions.create(**fields, temperature=0)
    entries = chat.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == chat.choices[0].message.content
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    streamed = client.chat.completions.create(**fields, temperature=0, stream=True)
    pieces = [entry for chunk in streamed for entry in (chunk.choices[0].logprobs or _Empty).content]
    assert [piece.token for piece in pieces] == [entry.token for entry in entries]


class _Empty:
    content: tuple[Any, ...] = ()
