"""What the routes answer, as /openapi.json describes it: the fields that are always there. More may stand beside them."""

from typing import Any, Literal

import msgspec

TEXT, HTML = "text/plain", "text/html"


class ErrorFields(msgspec.Struct):
    """What is wrong: `param` names the field as the client wrote it."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct):
    """Every error but Anthropic's."""

    error: ErrorFields


class AnthropicErrorFields(msgspec.Struct):
    """What is wrong."""

    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """Every error below /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorFields


class Usage(msgspec.Struct):
    """Tokens of a call; the prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatMessageAnswer(msgspec.Struct):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[dict[str, Any]] = []


class ChatChoice(msgspec.Struct):
    """One of the n answers."""

    index: int
    message: ChatMessageAnswer
    finish_reason: str
    logprobs: dict[str, Any] | None


class ChatCompletion(msgspec.Struct):
    """OpenAI's; a stream holds chunks of it."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(msgspec.Struct):
    """One of the answers: index = prompt * n + answer."""

    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None


class Completion(msgspec.Struct):
    """OpenAI's; a stream holds chunks of it."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class Response(msgspec.Struct):
    """OpenAI's response; a stream holds its events."""

    id: str
    object: Literal["response"]
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class AnthropicMessage(msgspec.Struct):
    """Anthropic's; a stream holds its events."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    usage: dict[str, Any]


class TokenCount(msgspec.Struct):
    """Anthropic's."""

    input_tokens: int


class MetaInfo(msgspec.Struct):
    """SGLang's figures of a request."""

    id: str
    finish_reason: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Generated(msgspec.Struct):
    """SGLang's answer to one prompt."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo


class Embedding(msgspec.Struct):
    """A vector, or its float32 values in base64."""

    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Tokens of a call."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """OpenAI's."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Scores(msgspec.Struct):
    """SGLang's: for each item the probability of each token."""

    scores: list[list[float]]


class Tokens(msgspec.Struct):
    """Ids of one text, or of each of several."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class Text(msgspec.Struct):
    """SGLang's name and vLLM's."""

    text: str | list[str]
    prompt: str | list[str]


class Model(msgspec.Struct):
    """OpenAI's, with vLLM's max_model_len."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(msgspec.Struct):
    """OpenAI's."""

    object: Literal["list"]
    data: list[Model]


class ModelInfo(msgspec.Struct):
    """SGLang's."""

    model_path: str
    is_generation: bool


class State(msgspec.Struct):
    """What a probe says."""

    status: str


class ServerInfo(msgspec.Struct):
    """What runs here."""

    version: str
    status: str
    args: dict[str, Any]


class Version(msgspec.Struct):
    """Of this server."""

    version: str


class Done(msgspec.Struct):
    """A control request was done."""

    success: bool
    message: str


class Aborted(msgspec.Struct):
    """How many requests were in flight, and will end."""

    num_aborted: int


ANSWERS: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Response,
    "/v1/messages": AnthropicMessage,
    "/v1/messages/count_tokens": TokenCount,
    "/generate": Generated | list[Generated | list[Generated]],
    "/v1/embeddings": EmbeddingList,
    "/v1/score": Scores,
    "/tokenize": Tokens,
    "/detokenize": Text,
    "/v1/models": ModelList,
    "/v1/models/{id}": Model,
    "/get_model_info": ModelInfo,
    "/livez": State,
    "/readyz": State,
    "/health": State,
    "/health_generate": State,
    "/server_info": ServerInfo,
    "/v1/requests": dict[str, Any],
    "/version": Version,
    "/flush_cache": Done,
    "/pause_generation": Done,
    "/continue_generation": Done,
    "/abort_request": Aborted,
    "/debug/requests/{rid}": dict[str, Any],
    "/metrics": TEXT,
    "/ui": HTML,
}
NEVER_OK = {"/v1/responses/{id}", "/v1/responses/{id}/input_items", "/v1/responses/{id}/cancel"}
