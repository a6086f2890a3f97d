"""The table of bad inputs: what is sent, and what must come back. B01 to B66; raw_inputs.py has those below HTTP.

Statuses follow OpenAI: 400 for what a client sent wrong, never 422 and never 5xx. A number of tokens that is larger than
the context has room for is clamped (B10, B14), a field that no route knows is ignored (B20's n_discard, B29, B42; no
field names a file, so B43's save_path is one of these), but for one of sampling_params.
"""

from typing import Any, NamedTuple

C, K, G = "/v1/chat/completions", "/v1/completions", "/generate"
VOCAB_SIZE, CONTEXT_LEN = 49152, 512
HI = [{"role": "user", "content": "hi"}]


class Row(NamedTuple):
    """`param` and `code` are not looked at where they are None; a `param` may go on where this one ends."""

    id: str
    path: str
    body: Any
    status: int = 400
    param: str | None = None
    code: str | None = None
    headers: dict[str, str | None] = {}
    method: str = "POST"


def raw(id_: str, body: bytes, code: str, path: str = C) -> Row:
    return Row(id_, path, body, code=code)


def chat(id_: str, param: str | None, *fields: dict[str, Any], status: int = 400, code: str | None = None) -> list[Row]:
    """Rows of one id: each a chat that is good but for these fields."""
    return [Row(id_, C, {"messages": HI, "max_tokens": 1, **each}, status, param, code) for each in fields]


def complete(
    id_: str, param: str | None, *fields: dict[str, Any], status: int = 400, code: str | None = None
) -> list[Row]:
    return [Row(id_, K, {"prompt": "a", "max_tokens": 1, **each}, status, param, code) for each in fields]


def generate(id_: str, param: str | None, *fields: dict[str, Any], status: int = 400) -> list[Row]:
    return [Row(id_, G, {"text": "a", **each}, status, param) for each in fields]


def values(name: str, *each: Any) -> list[dict[str, Any]]:
    return [{name: value} for value in each]


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool(**function: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {}}, **function},
    }


def image(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


BIG = 4 * 2**20 - 1024  # bytes of a body that is just taken
LONG_TEXTS = [
    "a" * BIG, " " * BIG, "\U0001f468\u200d\U0001f469\u200d\U0001f467" * (BIG // 18), "\u0bb9\u0c38\u4e2d\u00e9" * (BIG // 11),
    "x" * 2**20,
]  # fmt: skip

JSON = [
    raw("B01", b"", "invalid_json"),
    *[raw("B02", body, code) for body, code in (
        (b'{"model":"smol","messages":', "invalid_json"), (b"[]", "invalid_type"), (b"42", "invalid_type"),
        (b'"x"', "invalid_type"), (b"null", "invalid_type"))],
    *[raw("B03", body, "invalid_json") for body in (
        b"\xef\xbb\xbf{}", '{"messages":[]}'.encode("utf-16"), b'{"messages":"\xff"}', b'{"messages":"\x00"}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}')],
    raw("B04", b"[" * 100_000, "invalid_type"),
    raw("B04", b'{"x":' + b"[" * 100_000, "json_too_deep"),
    Row("B05", C, {}, param="messages"),
    *chat("B05", "messages", *values("messages", [], "hi", HI * 1025, [{"role": "god", "content": "x"}],
                                     [{"role": "user", "content": 5}])),
    *chat("B06", None, {}, {"model": "smollm2"}, status=200),
    *chat("B06", "model", {"model": "nope"}, status=404, code="model_not_found"),
    *complete("B07", "prompt", *values("prompt", "", [], [[]]), code="empty_prompt"),
    Row("B07", K, {}, param="prompt"),
    *complete("B08", "prompt", *values("prompt", ["a"] * 129, [[[1]]], [1, "a"])),
    *complete("B09", "prompt", *values("prompt", [-1], [VOCAB_SIZE], [2**63]), code="token_out_of_range"),
    *complete("B09", "prompt", *values("prompt", [1.5], [True]), code="invalid_type"),
    *complete("B10", "prompt", *values("prompt", [1] * (CONTEXT_LEN + 1), [1] * CONTEXT_LEN), code="context_length_exceeded"),
    *complete("B10", None, {"prompt": [1] * (CONTEXT_LEN - 2), "max_tokens": 99}, status=200),
]  # fmt: skip

SAMPLING = [
    *chat("B11", "n", *values("n", 0, -1, 17, 5_000_000, 10**30, 1.0, "1", True)),
    *complete("B12", "best_of", {"best_of": 1_000_000}, {"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}),
    *chat("B13", "top_logprobs", *[{"logprobs": True, "top_logprobs": number} for number in (-1, 21, 1_000_000)],
          {"top_logprobs": 2}),
    *complete("B13", "logprobs", {"logprobs": 6}, {"logprobs": -1}),
    *chat("B14", "max_tokens", *values("max_tokens", 0, -1, 2**63, "5")),
    *chat("B14", None, {"max_tokens": 2**31, "stop": [*"aeiou "]}, {"max_tokens": None, "stop": [*"aeiou "]}, status=200),
    *chat("B14", "max_completion_tokens", {"max_tokens": 1, "max_completion_tokens": 2}),
    *chat("B15", "temperature", *values("temperature", -0.1, 2.1, "hot")),
    *[raw("B15", b'{"messages":[{"role":"user","content":"x"}],"temperature":%b}' % value, code)
      for value, code in ((b"NaN", "invalid_json"), (b"Infinity", "invalid_json"), (b"1e400", "invalid_type"))],
    *[row for name, bad in (("top_p", (0, 1.0001, -1)), ("top_k", (-2,)), ("min_p", (1.1,)), ("repetition_penalty", (0,)),
                            ("frequency_penalty", (2.01,)), ("presence_penalty", (-3,)))
      for row in chat("B16", name, *values(name, *bad))],
    *chat("B17", "seed", *values("seed", 2**64, "a", 1.5)),
    *chat("B18", "logit_bias", *values("logit_bias", {"AI": -100}, {"-1": 1}, {str(VOCAB_SIZE): 1}, {"5": 101},
                                       {"5": 1e39}, {str(number): 1 for number in range(301)}, [1])),
    *chat("B19", "stop", *values("stop", ["x"] * 33, "", "x" * 257, [None])),
    *chat("B19", None, {"stop": ["x" * 256] * 4}, status=200),
    *[row for name in ("max_new_tokens", "min_new_tokens", "top_k", "seed", "n")
      for row in generate("B20", f"sampling_params.{name}", {"sampling_params": {name: 2**64}})],
    *generate("B20", "sampling_params.min_new_tokens", {"sampling_params": {"min_new_tokens": -1}},
              {"sampling_params": {"min_new_tokens": 6, "max_new_tokens": 5}}),
    *generate("B20", "sampling_params.top_k", {"sampling_params": {"top_k": 2**31}}),
    *generate("B20", "priority", {"priority": -1}, {"priority": 2**63}),
    *generate("B20", None, {"n_discard": -1, "sampling_params": {"max_new_tokens": 1}}, status=200),
    *generate("B20", "sampling_params.n_discard", {"sampling_params": {"n_discard": -1}}),
]  # fmt: skip

TEXT = [
    *[Row("B21", C, {"messages": [{"role": "user", "content": text}]}, code="context_length_exceeded")
      for text in LONG_TEXTS],
    Row("B22", K, {"prompt": "<|image_1|>" * 100_000}, code="context_length_exceeded"),
    Row("B22", K, {"prompt": "<|im_start|>" * 50_000}, code="context_length_exceeded"),
    *chat("B25", "messages", {"messages": [*HI, {"role": "tool", "content": "x"}]},
          {"messages": [*HI, {"role": "assistant", "tool_calls": [{"id": "x"}]}]}),
    *chat("B25", "tools", {"tools": [tool(name=f"f{number}") for number in range(1000)]}, {"tools": [tool(name="x" * 1024)]},
          {"tools": [tool(), tool()]}, {"tools": 5}, {"tools": [5]}),
    *chat("B25", "tool_choice", {"tool_choice": "required"}, {"tools": [tool()], "tool_choice": "sometimes"},
          {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
    *chat("B26", "chat_template", {"chat_template": "{{7*7}}"}, code="unsupported_parameter"),
    *chat("B27", "chat_template_kwargs", *values("chat_template_kwargs", {"tokenize": True}, {"messages": []},
                                                 {"x": {"deep": [1]}}, [])),
    *chat("B28", "stream", {"stream": "yes"}, {"stream_options": {"include_usage": True}},
          {"stream": True, "stream_options": {"include_usage": 1}}),
    *chat("B29", None, {"foo": {"bar": 1}}, status=200),
    *[row for regex, forced in ((r"(a+)+b", 81), (r"\s+$", 216), (r"(x+x+)+y", 104))  # the tokens "a", " ", "x"
      for row in chat("B37", None, {"stop_regex": regex, "logit_bias": {str(forced): 100}, "max_tokens": 12}, status=200)],
    *chat("B37", "stop_regex", {"stop_regex": r"(a*)*$", "logit_bias": {"81": 100}}),
    *chat("B38", "stop_regex", *values("stop_regex", ["a"] * 5, "a" * 129, "(", r"(a)\1", "(?=a)b")),
    *[row for url in ("http://169.254.169.254/", "file:///etc/passwd", "http://a\\@127.0.0.1/", "data:image/png;base64,AAAA")
      for row in chat("B39", "messages", image(url))],
    *complete("B40", "prompt_embeds", {"prompt_embeds": "gAJ9cQAu"}, code="unsupported_parameter"),
    *chat("B41", None, {"custom_logit_processor": "8004"}, {"custom_params": {"x": "8004"}}),
    *chat("B42", None, {"api_base": "http://127.0.0.1:1", "base_url": "http://127.0.0.1:1", "user_config": {}}, status=200),
    Row("B42", C, {"messages": HI}, 401, code="invalid_api_key", headers={"Authorization": "Bearer ' OR '1'='1"}),
    *chat("B43", "lora_path", {"lora_path": "../../x"}),
    *chat("B43", None, {"save_path": "../../x"}, status=200),
    *chat("B45", "cache_salt", *values("cache_salt", "", "x" * 257, 5)),
]  # fmt: skip

ENUM = {"enum": [f"value {number}" for number in range(3000)]}
ONE_OF: dict[str, Any] = {"type": "string"}
for _ in range(12):
    ONE_OF = {"oneOf": [ONE_OF, {"type": "object", "properties": {"a": ONE_OF}, "required": ["a"]}]}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
GRAMMARS = [
    *chat("B30", "response_format", {"response_format": {"type": "json_schema"}},
          *map(json_schema, ({"type": "zzz"}, LOOP, nested_schema(33), ONE_OF, ENUM, {"type": "string", "pattern": "("})),
          {"response_format": {"type": "yaml"}}, {"response_format": 5}),
    *chat("B31", "regex", *values("regex", "(", "a{1,100000}", "(a{1,1000}){1,1000}", "(?<=a)b", r"(a)\1")),
    *chat("B32", None, {"regex": "a\x00"}, json_schema({"type": "string", "pattern": "\x00"}), {"ebnf": 'root ::= "\x00'}),
    *chat("B33", "tools", {"tools": [tool(parameters={"type": 5})]},
          {"tools": [tool(parameters={"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}})],
           "tool_choice": "required"}),
    *chat("B34", None, {"regex": "a", "json_schema": "{}"}, {"structural_tag": "x"}, {"structural_tag": {"triggers": 5}}),
    *chat("B36", None, {"ebnf": "root ::= root root"}, {"ebnf": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000}),
]  # fmt: skip

EDGE = [
    *[Row("B47", K, {"prompt": "a", "max_tokens": 1, "rid": rid}, param="rid")
      for rid in ("x" * 129, "a\r\nX: 1", "a\x00", "\u00fc", "")],
    *[Row("B47", K, {"prompt": "a", "max_tokens": 1}, code="invalid_request_id", headers={"X-Request-Id": "x" * 129})],
    Row("B47", G, {"text": ["a", "b"], "rid": ["x", "x"]}, param="rid", code="duplicate_request_id"),
    *[Row("B48", K, {"prompt": "a"}, 401, code="invalid_api_key", headers={"Authorization": given})
      for given in (None, "Bearer", "Basic user-key", "Bearer user-keyx", "Bearer USER-KEY")],
    Row("B48", K + "?api_key=user-key", {"prompt": "a"}, 401, code="invalid_api_key", headers={"Authorization": None}),
    Row("B49", "/flush_cache", None, 403, code="admin_key_required"),
    Row("B49", "/flush_cache", None, 401, code="invalid_api_key", headers={"Authorization": None}),
    Row("B49", "/flush_cache", None, 405, headers={"Authorization": "Bearer admin-key"}, method="GET"),
    Row("B50", K, {"prompt": "a"}, 403, code="host_not_allowed", headers={"Host": "evil.example"}),
    Row("B50", K, {"prompt": "a"}, 403, code="origin_not_allowed", headers={"Origin": "https://evil.example"}),
    Row("B50", K, None, 403, headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"},
        method="OPTIONS"),
    *[Row("B53", K, b'{"prompt":"a"}', 415, headers={"Content-Type": kind})
      for kind in (None, "text/plain", "multipart/form-data; boundary=x")],
    Row("B54", K, b" " * (4 * 2**20 + 1), 413, code="request_too_large"),
    *[Row("B61", path, None, 404, method="GET") for path in (
        "//v1/models", "/v1/models/..%2f", "/V1/models", "/v1/models/", "/v1/models;a=b")],
    Row("B61", "/v1/%6dodels", None, 401, headers={"Authorization": None}, method="GET"),
    Row("B64", "/nope", None, 404, code="route_not_found"),
    *[Row("B64", K, None, 405, method=method) for method in ("GET", "HEAD", "PUT", "DELETE", "TRACE")],
    Row("B65", G, {"text": ["a"] * 4097}, param="text"),
    Row("B65", G, {"text": ["a"] * 10, "sampling_params": [{}] * 9 + [{"top_p": 2}]}, param="sampling_params[9].top_p"),
    Row("B65", G, {"text": "a", "input_ids": [1]}, param="input_ids"),
    Row("B65", G, {}, param="text"),
    Row("B66", "/tokenize", b'{"prompt":"' + b"a" * 4 * 2**20 + b'"}', 413),
    Row("B66", "/detokenize", {"tokens": [VOCAB_SIZE]}, param="tokens"),
    Row("B66", "/detokenize", {"tokens": [-1]}, param="tokens"),
]  # fmt: skip

ROWS = [*JSON, *SAMPLING, *TEXT, *GRAMMARS, *EDGE]
