"""Structured answers of the packaged model, through all processes: whatever is asked with it, `stop` means valid."""

import json
import re
from typing import Any

import openai
import pydantic
import pytest
import requests

from tests.e2e.server_process import ServerProcess
from tests.grammar.battery import problem_of, run

NUM_SCHEMAS = 40
MESSAGES = [{"role": "user", "content": "Tell me of a person."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "milk"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
PERSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
HOT = {"temperature": 1.5, "max_tokens": 300, "seed": 3}


@pytest.fixture(scope="module")
def server(default_server: ServerProcess) -> ServerProcess:
    return default_server


def chat(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    """The answer to a chat."""
    response = requests.post(
        server.url + "/v1/chat/completions", json={"messages": MESSAGES, **HOT, **fields}, timeout=90
    )
    assert response.ok, response.text
    answer: dict[str, Any] = response.json()
    return answer


def answer_of(server: ServerProcess, **fields: Any) -> str:
    """The text of an answer that ends by itself."""
    (choice,) = chat(server, **fields)["choices"]
    assert choice["finish_reason"] == "stop"
    text: str = choice["message"]["content"]
    return text


def test_answers_to_schemas_of_all_kinds_are_valid(server: ServerProcess) -> None:
    outcomes = run(server.url, NUM_SCHEMAS)
    assert [outcome for outcome in outcomes if outcome.problem] == []
    assert {outcome.finish_reason for outcome in outcomes} <= {"stop", "length"}
    assert sum(outcome.finish_reason == "stop" for outcome in outcomes) >= 0.9 * NUM_SCHEMAS


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 3},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 1.5},
        {"min_tokens": 250},
        {"logit_bias": {"2": 100}},
        {"temperature": 0},
        {"logprobs": True, "top_logprobs": 3},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_schema_holds_whatever_else_is_asked(server: ServerProcess, fields: dict[str, Any]) -> None:
    answer = chat(server, response_format=PERSON_FORMAT, **fields)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop"] * fields.get("n", 1)
    for choice in answer["choices"]:
        assert not problem_of(choice["message"]["content"], PERSON)


def test_a_stream_is_the_whole_answer_in_pieces(server: ServerProcess) -> None:
    body = {"messages": MESSAGES, **HOT, "response_format": PERSON_FORMAT, "stream": True}
    response = requests.post(server.url + "/v1/chat/completions", json=body, timeout=90)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == answer_of(server, response_format=PERSON_FORMAT)
    assert not problem_of(text, PERSON)


def test_a_stop_string_of_the_client_may_cut(server: ServerProcess) -> None:
    answer = chat(server, response_format=PERSON_FORMAT, stop=['"age"'])
    assert re.fullmatch(r'\{\s?"name"\s?:\s?".*"\s?,\s?', answer["choices"][0]["message"]["content"])


def test_words_that_leave_a_grammar_no_token_are_the_clients_error(server: ServerProcess) -> None:
    body = {"prompt": "x", "max_tokens": 20, "bad_words": ["a"], "regex": "a"}
    response = requests.post(server.url + "/v1/completions", json=body, timeout=30)
    assert response.status_code == 400
    assert "bad_words" in response.json()["error"]["message"]


def test_openai_parses_a_model_of_pydantic(server: ServerProcess) -> None:
    class Person(pydantic.BaseModel):
        """What the answer becomes."""

        name: str = pydantic.Field(max_length=20)
        age: int = pydantic.Field(ge=0, le=120)

    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        answer = client.chat.completions.parse(
            model="smollm2",
            messages=MESSAGES,  # type: ignore[arg-type]
            response_format=Person,
            max_tokens=200,
            seed=1,
        )
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]{4}"}, "[0-9]{3}-[a-f]{4}"),
        ({"guided_regex": "[0-9]{2}"}, "[0-9]{2}"),
        ({"choice": ["yes", "no", 'a "third"']}, '(yes|no|a "third")'),
        ({"structured_outputs": {"choice": ["x", "y"]}}, "[xy]"),
        ({"ebnf": 'root ::= "the " ("cat" | "dog") [0-9]'}, "the (cat|dog)[0-9]"),
        ({"grammar": 'start: "a" start | "b"', "logit_bias": {"66": 5}}, "a*b"),
        ({"regex": "[0-9]{5}", "min_tokens": 50, "ignore_eos": True}, "[0-9]{5}"),
    ],
)
def test_other_forms_in_each_apis_words(server: ServerProcess, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, answer_of(server, **fields))


def test_json_object_is_an_object(server: ServerProcess) -> None:
    answer = chat(server, response_format={"type": "json_object"}, temperature=0)
    (choice,) = answer["choices"]
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    else:
        assert choice["message"]["content"].startswith("{")


def test_a_structural_tag_holds_inside_free_text(server: ServerProcess) -> None:
    structures = [{"begin": "<person>", "schema": PERSON, "end": "</person>"}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<person"]}
    messages = [{"role": "user", "content": "Repeat: <person>"}, {"role": "assistant", "content": "<person"}]
    answer = chat(server, messages=messages, response_format=tag, temperature=0)
    for content in re.findall("<person>(.*?)</person>", answer["choices"][0]["message"]["content"], re.DOTALL):
        assert not problem_of(content, PERSON)


def test_generate_and_completions_have_a_grammar_for_each_prompt(server: ServerProcess) -> None:
    params = [{"regex": "[0-9]{4}"}, {"json_schema": json.dumps(PERSON)}, {"max_new_tokens": 3}]
    body = {"text": ["A year:", "A person:", "A word:"], "sampling_params": params}
    year, person, word = requests.post(server.url + "/generate", json=body, timeout=90).json()
    assert re.fullmatch("[0-9]{4}", year["text"])
    assert year["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
    assert person["meta_info"]["finish_reason"]["type"] == "length" or not problem_of(person["text"], PERSON)
    assert word["meta_info"]["completion_tokens"] == 3
    body = {"prompt": ["One:", "Two:"], "choice": [" 1", " 2"], "max_tokens": 9}
    choices = requests.post(server.url + "/v1/completions", json=body, timeout=90).json()["choices"]
    assert all(choice["text"] in {" 1", " 2"} and choice["finish_reason"] == "stop" for choice in choices)


def test_bad_grammars_are_the_clients_errors_and_the_metrics_count(server: ServerProcess) -> None:
    bad = {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "zzz"}}}}
    response = requests.post(server.url + "/v1/chat/completions", json=bad, timeout=90)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "response_format.json_schema.schema"
    params = {"text": "x", "sampling_params": [{"regex": "("}]}
    response = requests.post(server.url + "/generate", json={**params, "text": ["x"]}, timeout=90)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "sampling_params[0].regex")
    metrics = requests.get(server.url + "/metrics", timeout=10).text
    found = dict(re.findall(r"^millstream_(\w*grammar\w*)\{model_name=\"smollm2\"\} ([0-9.]+)$", metrics, re.MULTILINE))
    assert float(found["num_grammar_total"]) > NUM_SCHEMAS
    assert float(found["num_grammar_timeout_total"]) == float(found["num_grammar_queue_reqs"]) == 0
    assert float(found["grammar_compilation_time_seconds_count"]) > NUM_SCHEMAS
