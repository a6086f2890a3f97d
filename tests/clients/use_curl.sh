#!/usr/bin/env bash
# curl: chat, a stream, Anthropic's messages, HEAD, chunked and compressed bodies, a status.
set -euo pipefail
json='Content-Type: application/json'
ask='{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24, "temperature": 0'

curl -sSf "$BASE_URL/v1/chat/completions" -H "$json" -d "$ask}" | grep -q Paris
curl -sSfN "$BASE_URL/v1/chat/completions" -H "$json" -d "$ask, \"stream\": true}" | tail -n 2 | grep -qx 'data: \[DONE\]'
curl -sSfN "$BASE_URL/v1/messages" -H "$json" -d "$ask, \"stream\": true}" | grep -qx 'event: message_stop'
curl -sSfN "$BASE_URL/v1/responses" -H "$json" -d '{"input": "Hi", "max_output_tokens": 4, "stream": true}' |
  grep -qx 'event: response.incomplete'
curl -sSfI "$BASE_URL/v1/models" | grep -q '^HTTP/1.1 200'
curl -sSf "$BASE_URL/v1/chat/completions" -H "$json" -H 'Transfer-Encoding: chunked' -d "$ask}" | grep -q Paris
echo "$ask}" | gzip | curl -sSf "$BASE_URL/v1/chat/completions" -H "$json" -H 'Content-Encoding: gzip' --data-binary @- | grep -q Paris
test "$(curl -sS -o /dev/null -w '%{http_code}' "$BASE_URL/v1/chat/completions" -H "$json" -d '{')" = 400
