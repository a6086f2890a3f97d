"""The words of an explanation: the JSON of GET /debug/requests/{rid} as lines for a person."""

import string
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

SENTENCES = {
    "grammar": "waits until its grammar is compiled",
    "queued": "joined the queue, where {position} requests with {queue_tokens} tokens waited, under {policy}",
    "refused": "was refused with status {status_code}: {reason}",
    "blocked": "waited {for_seconds:.3f} s in step {step}..{last_step}: {reason}",
    "backfilled": "went ahead of {past}, which did not fit yet",
    "admitted": "started after {waited_seconds:.3f} s in row {row}: {cached_tokens} tokens cached, {new_tokens} to compute",
    "chunk": "computes positions {start} up to {end}",
    "first_token": "its first token is back",
    "retracted": "was put back into the queue with {outputs} output tokens, and gave {held_pages} pages back: {reason}",
    "preempted": "made room for the more urgent {by}, with {outputs} output tokens",
    "text_ended": "a stop string or regex ended it after {tokens} output tokens",
    "ended": "ended by {reason} after {tokens} output tokens, {steps} steps and {retractions} retractions",
    "omitted": "{events} events are left out here",
}
REASONS = {
    "rows": "every row is taken (--max-running-requests)",
    "chunk budget": "the step computes no more prompt tokens (--chunked-prefill-size)",
    "input budget": "the step admits no more prompt tokens (--max-prefill-tokens)",
    "prefix of another request": "another request is computing its prefix",
    "kv_cache": "the KV cache was full",
    "paused": "generation was paused",
    "reserved for the head": "it would make the first in the queue wait longer",
}
NUMBERS = {
    "need": "needs {} tokens",
    "lacking": "lacks {}",
    "rem_total_tokens": "{} left",
    "rem_chunk_tokens": "{} left",
    "rem_input_tokens": "{} left",
    "rows": "{} rows",
    "of": "request {}",
    "head": "request {}",
    "tokens": "{} tokens",
    "extra_tokens": "{} tokens to spare",
}
OF_EVERY_EVENT = {"seconds", "step", "what"}


def explanation_lines(body: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a whole answer: one request, or the requests of a batch."""
    if "requests" not in body:
        yield from request_lines(body)
        return
    yield f"{body['num_requests']} requests of one call"
    for each in body["requests"]:
        yield ""
        yield from request_lines(each)


def request_lines(body: Mapping[str, Any]) -> Iterator[str]:
    """What became of one request, then one line for each event."""
    label = f" (label {body['label']})" if body.get("label") else ""
    yield f"request {body['rid']}{label}: {body['status']}{_finish(body.get('finish_reason'))}"
    yield "  " + ", ".join(_facts(body))
    events = body.get("events", [])
    for event in events:
        yield f"  {event['seconds']:>10.3f} s  step {event['step']:<7} {sentence(event)}"
    if not events:
        yield "  the scheduler knows no events of it (any more)"


def sentence(event: Mapping[str, Any]) -> str:
    """One event in plain words; of a kind that has none here, or with numbers missing, its name and numbers."""
    what, numbers = event["what"], dict(event)
    if what == "waited":
        return _waited(numbers)
    if isinstance(numbers.get("reason"), str):
        numbers["reason"] = REASONS.get(numbers["reason"], _plain(numbers["reason"]))
    template = SENTENCES.get(what, "")
    said = OF_EVERY_EVENT | {name for _, name, _, _ in string.Formatter().parse(template) if name}
    try:
        text = template.format_map(numbers)
    except (KeyError, ValueError):
        text, said = "", OF_EVERY_EVENT
    if what == "blocked":
        said = said | {"steps"}  # the range of steps says it
    rest = [NUMBERS.get(name, _plain(name) + " {}").format(numbers[name]) for name in numbers if name not in said]
    return (text or _plain(what)) + (f": {', '.join(rest)}" if rest else "")


def _waited(numbers: Mapping[str, Any]) -> str:
    """What kept the first of the queue out, and so this one behind it."""
    seconds = {REASONS.get(name, name): value for name, value in numbers.items() if name not in OF_EVERY_EVENT}
    reasons = "; ".join(f"{value:.3f} s: {reason}" for reason, value in seconds.items())
    return f"waited in the queue, where the first could not start for {reasons}"


def _finish(reason: Mapping[str, Any] | None) -> str:
    if not reason:
        return ""
    more = reason.get("message") or reason.get("matched")
    return f", {reason['type']}" + (f" ({more!r})" if more is not None else "")


def _facts(body: Mapping[str, Any]) -> Iterator[str]:
    arrived = datetime.fromtimestamp(body["arrival_time"], UTC)
    yield f"arrived {arrived:%Y-%m-%d %H:%M:%S} UTC"
    if body.get("first_output_seconds") is not None:
        yield f"first output after {body['first_output_seconds']:.3f} s"
    if body.get("ended_seconds") is not None:
        yield f"ended after {body['ended_seconds']:.3f} s"
    cached = f" ({body['cached_tokens']} cached)" if body.get("cached_tokens") is not None else ""
    yield f"{body['prompt_tokens']} prompt tokens{cached}"
    if body.get("completion_tokens") is not None:
        yield f"{body['completion_tokens']} output tokens"


def _plain(name: str) -> str:
    return name.replace("_", " ")
