"""Seeded answers are the same whatever runs beside them, however prompts are cut, and on however many ranks."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.server_process import EXACT_FLAGS, ServerProcess, serving, wait_until

CHANGES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3, "top_p": 0.9},
    {"frequency_penalty": 0.7, "presence_penalty": 0.4, "top_k": 50},
    {"logit_bias": {"253": 4.0, "28": -100}, "min_new_tokens": 20},
    {"bad_words": ["the", "mill"], "min_p": 0.02},
    {"n": 3, "repetition_penalty": 1.2},
]


def ask(server: ServerProcess, index: int) -> list[list[int]]:
    """The answers to one of the requests."""
    prompt = f"Chapter {index}. " + "The old miller looked at the river and said that " * 3
    params = {"max_new_tokens": 24, "temperature": 0.9, "sampling_seed": 100 + index, **CHANGES[index]}
    response = server.post("/generate", {"text": prompt, "sampling_params": params})
    assert response.status_code == 200, response.text
    found = response.json()
    return [answer["output_ids"] for answer in (found if isinstance(found, list) else [found])]


@pytest.fixture(scope="module")
def server(exact_server: ServerProcess) -> ServerProcess:
    """One rank, and memory for all."""
    return exact_server


def test_seeded_answers_are_stable_across_batches_chunks_retractions_and_ranks(server: ServerProcess) -> None:
    alone = [ask(server, index) for index in range(len(CHANGES))]
    check_answers(alone)
    flags = ("--max-total-tokens", "300", "--page-size", "1", "--schedule-conservativeness", "0")
    with serving("smollm2", *EXACT_FLAGS, *flags, "--tp-size", "2", "--chunked-prefill-size", "17") as tight:
        with ThreadPoolExecutor(len(CHANGES)) as pool:
            together = list(pool.map(lambda index: ask(tight, index), range(len(CHANGES))))
        wait_until(lambda: tight.metric("millstream_num_retracted_requests_total") > 0, 10, "a request was retracted")
    assert together == alone


def check_answers(alone: list[list[list[int]]]) -> None:
    """What the parameters promise of the answers."""
    assert len({tuple(answer) for answer in alone[5]}) == 3, "answers to one prompt have seeds of their own"
    assert all(28 not in answer for answer in alone[3]), "a bias of -100 forbids"
    assert len(alone[3][0]) >= 20


def test_chat_answers_several_choices_and_obeys_its_parameters(server: ServerProcess) -> None:
    body = {
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 12,
        "n": 4,
        "seed": 1,
        "temperature": 1.0,
        "bad_words": ["blue", "Blue", "red", "Red"],
    }
    answer = server.post("/v1/chat/completions", body).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    assert not any(word in text.lower().split() for text in texts for word in ("blue", "red"))
    single = server.post("/v1/chat/completions", {**body, "n": 1}).json()
    assert single["choices"][0]["message"]["content"] == texts[0], "the first answer keeps the seed"
    assert single["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
