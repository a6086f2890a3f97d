"""The served tokens are Hugging Face's, whatever the ranks, the cache and the schedule do."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.make_reference import load_reference
from tests.e2e.server_process import ServerProcess, serving
from tests.e2e.teacher_forced import BF16_GAP, FP32_GAP, Reference, check_same_tokens

REFERENCES = load_reference()
EOS_IDS = {0, 2}
SHORT = [reference for reference in REFERENCES if len(reference.prompt_ids) <= 700]


def generate(server: ServerProcess, prompt_ids: list[int], num_tokens: int, *, ignore_eos: bool = True) -> list[int]:
    """Greedy tokens of one request."""
    params = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": ignore_eos}
    response = server.post("/generate", {"input_ids": prompt_ids, "sampling_params": params})
    assert response.status_code == 200, response.text
    return list(response.json()["output_ids"])


def check(server: ServerProcess, references: list[Reference], max_gap: float) -> None:
    check_same_tokens(references, lambda prompt, count: generate(server, prompt, count), max_gap)


def test_greedy_tokens_are_hugging_faces(default_server: ServerProcess) -> None:
    assert len(REFERENCES) >= 20
    check(default_server, REFERENCES, BF16_GAP)


@pytest.mark.parametrize("tp_size", [2, 3])
def test_greedy_tokens_of_several_ranks_are_hugging_faces(tp_size: int) -> None:
    with serving("smollm2", "--tp-size", str(tp_size)) as server:
        check(server, REFERENCES, BF16_GAP)


def test_gloo_between_ranks_gives_the_same_tokens() -> None:
    with serving("smollm2", "--tp-size", "2", "--disable-custom-all-reduce") as server:
        check(server, REFERENCES[:8], BF16_GAP)
        connections = [each for child in server.remember_processes().values() for each in child.net_connections("inet")]
        assert {each.laddr.ip for each in connections if each.status == "LISTEN"} <= {"127.0.0.1"}


def test_tokens_are_the_same_with_the_cache_cold_and_warm() -> None:
    with serving("smollm2", "--dtype", "float32") as server:
        check(server, SHORT, FP32_GAP)
        num_prompt_tokens = sum(len(each.prompt_ids) for each in SHORT)
        assert server.metric("millstream_cached_tokens_total") < 0.1 * num_prompt_tokens
        check(server, SHORT, FP32_GAP)
        assert server.metric("millstream_cached_tokens_total") > 0.8 * num_prompt_tokens


def test_tokens_are_the_same_without_cache_and_overlap_and_with_odd_chunks() -> None:
    flags = ("--disable-radix-cache", "--disable-overlap-schedule", "--chunked-prefill-size", "112")
    with serving("smollm2", "--dtype", "float32", *flags) as server:
        check(server, SHORT, FP32_GAP)
        assert server.metric("millstream_cached_tokens_total") == 0


@pytest.fixture(scope="module")
def tight_server() -> Iterator[ServerProcess]:
    """A server in fp32 whose cache holds little more than the longest request."""
    with serving("smollm2", "--dtype", "float32", "--max-total-tokens", "1024", "--page-size", "4") as server:
        yield server


def test_tokens_are_the_same_while_the_cache_evicts_all_the_time(tight_server: ServerProcess) -> None:
    for _ in range(2):
        check(tight_server, SHORT, FP32_GAP)


def test_tokens_are_the_same_when_requests_are_retracted() -> None:
    # Only where a request may end early does the scheduler admit more than fits in the end.
    requests = [each for each in REFERENCES if 31 <= len(each.prompt_ids) <= 128 and not EOS_IDS & set(each.tokens)]
    num_prompt_tokens = sum(len(each.prompt_ids) for each in requests)
    flags = ("--max-total-tokens", str(num_prompt_tokens + 60), "--page-size", "1", "--schedule-conservativeness", "0")
    with serving("smollm2", "--dtype", "float32", *flags) as server:
        check_same_tokens(requests, lambda prompt, n: generate(server, prompt, n, ignore_eos=False), FP32_GAP)
        assert server.metric("millstream_num_retracted_requests_total") > 0


def test_a_request_that_can_never_fit_is_refused_with_both_numbers(tight_server: ServerProcess) -> None:
    prompt = REFERENCES[-1].prompt_ids
    response = tight_server.post("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 4}})
    assert response.status_code == 400
    assert "3000" in response.json()["error"]["message"].replace(",", "")
    assert "1024" in response.json()["error"]["message"].replace(",", "")


def test_a_seeded_request_gives_the_same_text_alone_and_among_others(tight_server: ServerProcess) -> None:
    body = {"prompt": "The miller", "max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 7}
    alone = tight_server.complete(**body)["choices"][0]["text"]
    others = [{**body, "prompt": f"Number {index} is", "seed": index, "top_k": 40} for index in range(31)]
    with ThreadPoolExecutor(32) as pool:
        futures = [pool.submit(tight_server.complete, **other) for other in [*others[:16], body, *others[16:]]]
        texts = [future.result()["choices"][0]["text"] for future in futures]
    assert texts[16] == alone
    assert len(set(texts)) > 20
