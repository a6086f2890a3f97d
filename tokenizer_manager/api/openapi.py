"""GET /openapi.json: made from the table of routes and from the structs that decode requests."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web

from ... import __version__
from ..access import Level
from ..api_error import json_response
from ..routes import Handler, Route
from .openapi_answers import ANSWERS, NEVER_OK, AnthropicError, ErrorAnswer

REF = "#/components/schemas/{name}"
JSON, EVENTS = "application/json", "text/event-stream"
ANTHROPIC_PATHS = "/v1/messages"
MODULE_NAME = re.compile(r"\bmillstream\.(?:\w+\.)?(\w+)\.(?=[A-Z])")
SECURITY: dict[Level, list[dict[str, list[str]]]] = {
    Level.PUBLIC: [],
    Level.USER: [{}, {"bearer": []}, {"apiKey": []}],  # {}: where the server has no keys
    Level.ADMIN: [{}, {"bearer": []}, {"apiKey": []}],
}
SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def openapi_handler(routes: Sequence[Route]) -> Handler:
    """GET /openapi.json."""
    document = openapi_document(routes)

    async def openapi(request: web.Request) -> web.Response:
        return json_response(document)

    return openapi


def openapi_document(routes: Sequence[Route]) -> dict[str, Any]:
    """OpenAPI 3.1. A route without an entry in ANSWERS (or NEVER_OK) is a LookupError: the server does not start."""
    answers = [answer for answer in ANSWERS.values() if not isinstance(answer, str)]
    bodies = [route.body for route in routes if route.body is not None]
    types = [*dict.fromkeys([*bodies, *answers, ErrorAnswer, AnthropicError])]
    schemas, components = msgspec.json.schema_components(types, ref_template=REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.plain_path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "millstream", "version": __version__},
        "paths": _portable(paths),
        "components": {"schemas": _portable(components), "securitySchemes": SCHEMES},
    }


def _operation(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    path = route.plain_path
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": re.sub(r"\W+", "_", f"{route.method} {path}".lower()).strip("_"),
        "security": SECURITY[route.level],
        "responses": _responses(route, schema_of),
    }
    if route.level is Level.ADMIN:
        operation["description"] = "Needs the admin key where the server has keys."
    names = re.findall(r"{(\w+)}", path)
    if names:
        text = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    if route.body is not None:
        is_required = any(field.required for field in msgspec.structs.fields(route.body))
        operation["requestBody"] = {"required": is_required, "content": {JSON: {"schema": schema_of[route.body]}}}
    return operation


def _responses(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    path = route.plain_path
    error = AnthropicError if path.startswith(ANTHROPIC_PATHS) else ErrorAnswer
    failed = {"description": "an error", "content": {JSON: {"schema": schema_of[error]}}}
    responses = {"4XX": failed, "5XX": failed}
    if path in NEVER_OK:
        return responses
    if path not in ANSWERS:
        raise LookupError(f"{path} has no entry in openapi_answers.py")
    answer = ANSWERS[path]
    content = (
        {answer: {"schema": {"type": "string"}}} if isinstance(answer, str) else {JSON: {"schema": schema_of[answer]}}
    )
    if route.body is not None and "stream" in route.body.__struct_fields__:
        content[EVENTS] = {"schema": {}}
    return {"200": {"description": "the answer", "content": content}, **responses}


def _portable(value: Any) -> Any:
    """Patterns as every dialect of regexes reads them, and names of structs without those of their modules."""
    if isinstance(value, dict):
        return {_short_name(key): _portable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_portable(item) for item in value]
    return _short_name(value).replace(r"\Z", "$") if isinstance(value, str) else value


def _short_name(text: str) -> str:
    """millstream.tokenizer_manager.api.chat_protocol.Tool -> ChatProtocolTool, wherever it stands."""
    return MODULE_NAME.sub(lambda found: found[1].title().replace("_", ""), text)
