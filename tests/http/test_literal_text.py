"""Special tokens in a message are text, and all other text is tokenized as ever."""

from hypothesis import given
from hypothesis import strategies as st

from millstream.tokenizer_manager.chat.literal_text import MARK, LiteralText, unmarked_pieces
from tests.tokenizer_manager.live_server import END, END_ID, LiveServer

SPECIAL = ("<|end|>", "<|", "ab", "bc", "aa", "\u00e9\u00e9")
LITERAL = LiteralText(SPECIAL)
PARTS = ["a", "b", "c", "<", "|", "end", "|>", "\u00e9", MARK, "<|end|>"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


@given(TEXTS)
def test_no_piece_holds_a_special_token_and_no_text_is_lost(text: str) -> None:
    pieces = unmarked_pieces(LITERAL.mark(text))
    assert not [special for special in SPECIAL for piece in pieces if special in piece]
    assert "".join(pieces) == text.replace(MARK, "")


def test_all_texts_of_messages_and_tools_are_marked() -> None:
    call = {"function": {"name": "f", "arguments": {"<|end|>": ["<|end|>", 5, None, True]}}}
    marked = LITERAL.mark([{"role": "user", "content": "x<|end|>"}, call])
    assert "<|end|>" not in str(marked)
    assert marked[1]["function"]["arguments"]["<" + MARK + "|" + "end|>"][1:] == [5, None, True]


def test_a_message_can_not_end_its_turn_on_any_chat_route(server: LiveServer) -> None:
    messages = [{"role": "user", "content": f"a{END}b"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/messages", {"messages": messages}),
        ("/v1/responses", {"input": messages, "max_output_tokens": 1}),
    ):
        before = len(server.backend.requests)
        assert server.post(path, body | ({} if "input" in body else {"max_tokens": 1})).status == 200
        ids = [
            value for request in server.backend.requests[before:] for value in memoryview(request.input_ids).cast("i")
        ]
        assert END_ID not in ids
        assert bytes(ids).decode().count(f"a{END}b") == 1
    tokens = server.post("/tokenize", {"messages": messages}).json["tokens"]
    assert END_ID not in tokens


def test_in_a_plain_prompt_it_counts(server: LiveServer) -> None:
    assert END_ID in server.post("/tokenize", {"prompt": f"a{END}b"}).json["tokens"]
    assert server.post("/v1/completions", {"prompt": f"a{END}b", "max_tokens": 1}).status == 200
    assert END_ID in memoryview(server.backend.requests[-1].input_ids).cast("i")
