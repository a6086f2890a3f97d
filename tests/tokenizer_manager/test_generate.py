"""POST /generate, /tokenize, /detokenize: SGLang's shapes."""

from typing import Any

import msgspec
import pytest

from millstream.common.finish_reason import FINISH_LENGTH
from millstream.common.messages import pack_int32, unpack_int32
from millstream.common.text_messages import RequestStats, StrEnd
from millstream.tokenizer_manager.api.generate_service import GenerateAnswer
from millstream.tokenizer_manager.call import Call
from millstream.tokenizer_manager.req_state import Output, ReqState
from tests.tokenizer_manager.live_server import CONTEXT_LEN, END, END_ID, LiveServer, byte_tokenizer

PATH = "/generate"


def test_an_answer_has_text_ids_and_meta_info(server: LiveServer) -> None:
    server.backend.num_cached = 2
    answer = server.post(PATH, {"text": "abc", "sampling_params": {"max_new_tokens": 2}, "rid": "mine"})
    assert answer.status == 200
    meta = answer.json["meta_info"]
    assert answer.json["text"] == "ab"
    assert answer.json["output_ids"] == [97, 98]
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 2,
        "num_retractions": 0,
    }


def test_output_ids_include_the_stop_token_that_ended_it(server: LiveServer) -> None:
    answer = server.post(PATH, {"text": "abc", "sampling_params": {"stop_token_ids": [98]}}).json
    assert (answer["text"], answer["output_ids"]) == ("a", [97, 98])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 98}
    assert answer["meta_info"]["completion_tokens"] == 2


def test_the_default_length_is_128_tokens_and_null_fills_the_context(server: LiveServer) -> None:
    assert len(server.post(PATH, {"text": "a"}).json["output_ids"]) == 128
    answer = server.post(PATH, {"text": "a", "sampling_params": {"max_new_tokens": None}})
    assert len(answer.json["output_ids"]) == CONTEXT_LEN - 1


@pytest.mark.parametrize("prompts", [{"text": ["ab", "xy"]}, {"input_ids": [[97, 98], [120, 121]]}])
def test_a_batch_is_answered_by_a_list_in_order(server: LiveServer, prompts: dict[str, Any]) -> None:
    params = [{"max_new_tokens": 1}, {"max_new_tokens": 3, "sampling_seed": 5}]
    answers = server.post(PATH, {**prompts, "sampling_params": params, "rid": ["one", "two"]}).json
    assert [answer["text"] for answer in answers] == ["a", "xyx"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["one", "two"]
    assert server.backend.requests[1].sampling_params.seed == 5


def test_a_batch_of_one_is_answered_by_a_list_of_one(server: LiveServer) -> None:
    assert len(server.post(PATH, {"text": ["a"]}).json) == 1
    assert len(server.post(PATH, {"input_ids": [[97]]}).json) == 1


def test_input_ids_alone_are_one_prompt(server: LiveServer) -> None:
    answer = server.post(PATH, {"input_ids": [104, 105], "sampling_params": {"max_new_tokens": 3}})
    assert answer.json["text"] == "hih"


def test_a_stream_carries_the_text_so_far(server: LiveServer) -> None:
    events = server.events(PATH, {"text": "abc", "sampling_params": {"max_new_tokens": 3}, "stream": True})
    assert events.pop() == "[DONE]"
    assert [event["text"] for event in events] == ["a", "ab", "abc"]
    assert [event["output_ids"] for event in events] == [[97], [97, 98], [97, 98, 99]]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3]
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None, None, {"type": "length", "length": 3}]


def test_incremental_events_add_up_to_the_whole_answer() -> None:
    body = {"text": ["abc", "xy"], "sampling_params": {"max_new_tokens": 5}, "return_logprob": True}
    body |= {"logprob_start_len": [0, 1], "top_logprobs_num": 2, "token_ids_logprob": [[97], [98]]}
    with LiveServer(incremental_streaming_output=True) as server:
        whole = server.post(PATH, body).json
        events = server.events(PATH, {**body, "stream": True})
    assert events.pop() == "[DONE]"
    for index, expected in enumerate(whole):
        mine = [event for event in events if event["index"] == index]
        assert len(mine) == 5
        assert "".join(event["text"] for event in mine) == expected["text"]
        assert [token_id for event in mine for token_id in event["output_ids"]] == expected["output_ids"]
        assert [event["meta_info"]["completion_tokens"] for event in mine] == [1, 2, 3, 4, 5]
        for name in [name for name in expected["meta_info"] if name.endswith("_logprobs")]:
            assert [item for event in mine for item in event["meta_info"][name]] == expected["meta_info"][name]


def test_all_events_of_a_long_stream_are_a_bounded_number_of_times_as_long_as_the_last() -> None:
    req = ReqState(Call(0.0, "id"), "rid", None, index=0, prompt_len=1, stream=True)
    answer = GenerateAnswer(req, byte_tokenizer(), with_texts=False)
    sizes = []
    for _ in range(4000):
        answer.add(Output("x" * 200, pack_int32([97]), None))
        if answer.is_due:
            sizes.append(len(msgspec.json.encode(answer.to_json())))
    assert sizes[:3] == [sizes[0], sizes[0] + 203, sizes[0] + 406]
    assert sum(sizes) < 50 * sizes[-1]
    answer.add(Output("y", b"", StrEnd(FINISH_LENGTH(4000), 4000, RequestStats(1, 0, 0))))
    assert answer.is_due
    assert bytes(answer.to_json()["text"]).endswith(b'xy"')


def test_a_streamed_batch_names_the_index_of_each_event(server: LiveServer) -> None:
    events = server.events(PATH, {"text": ["ab", "xy"], "sampling_params": {"max_new_tokens": 2}, "stream": True})
    last = {event["index"]: event["text"] for event in events[:-1]}
    assert last == {0: "ab", 1: "xy"}


def test_an_aborted_request_keeps_what_it_has(server: LiveServer) -> None:
    server.backend.paused = True
    connection = server.send("POST", PATH, {"text": "abc", "rid": "mine"})
    with connection:
        server.until(lambda: server.backend.num_running == 1)
        server.call(server.backend.step)
        assert server.post("/abort_request", {"rid": "mine"}).json == {"num_aborted": 1}
        response = connection.getresponse()
        with response:
            assert response.status == 200
            body = response.read()
    assert b'"text":"a"' in body
    assert b'"type":"abort"' in body


def test_tokenize_and_detokenize_are_inverse(server: LiveServer) -> None:
    answer = server.post("/tokenize", {"prompt": f"hi{END}"}).json
    assert answer == {"tokens": [104, 105, END_ID], "count": 3, "max_model_len": CONTEXT_LEN}
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json["text"] == "hi"
    kept = server.post("/detokenize", {"tokens": answer["tokens"], "skip_special_tokens": False}).json
    assert kept == {"text": f"hi{END}", "prompt": f"hi{END}"}


def test_messages_are_tokenized_as_the_chat_route_does(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    answer = server.post("/tokenize", {"messages": messages}).json
    assert answer["tokens"] == unpack_int32(server.backend.requests[0].input_ids)
    assert server.post("/tokenize", {"messages": []}).error["param"] == "messages"


def test_tokenize_and_detokenize_take_lists(server: LiveServer) -> None:
    answer = server.post("/tokenize", {"prompt": ["a", "bc"]}).json
    assert (answer["tokens"], answer["count"]) == ([[97], [98, 99]], [1, 2])
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json["text"] == ["a", "bc"]
    assert server.post("/detokenize", {"tokens": []}).json["text"] == ""
