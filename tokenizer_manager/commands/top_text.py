"""The table of `millstream top`, from its figures."""

from typing import Any

from .terminal_text import printable

BAR_WIDTH = 20
COLUMNS = "{:>8} {:>8} {:>8} {:>9} {:>9}  {}"
NARROWEST = 40


def table(title: str, figures: dict[str, Any], *, width: int, height: int) -> str:
    """At most `height` lines of at most `width` characters; the requests that find no room are counted."""
    head = [title, *_head(figures), ""]
    requests = figures["requests"]
    room = max(0, height - len(head) - 2)
    shown = requests if len(requests) <= room else requests[: max(0, room - 1)]
    rows = [_row(request) for request in shown]
    if len(shown) < len(requests):
        rows.append(f"... and {len(requests) - len(shown)} more")
    lines = [*head, COLUMNS.format("AGE s", "PROMPT", "OUTPUT", "TTFT ms", "TOKENS/s", "REQUEST"), *rows]
    return "\n".join(printable(line)[: max(width, NARROWEST)].rstrip() for line in lines)


def _head(figures: dict[str, Any]) -> list[str]:
    ended = ", ".join(f"{number} {outcome}" for outcome, number in figures["ended"].items() if number) or "none"
    filled = round(BAR_WIDTH * min(figures["kv_usage"], 1.0))
    bar = "#" * filled + "." * (BAR_WIDTH - filled)
    paused = "   PAUSED" if figures["paused"] else ""
    return [
        f"requests  running {figures['running']}   queued {figures['queued']} ({figures['queued_tokens']:,} tokens){paused}",
        f"ended     {figures['requests_per_s']:.1f}/s   {ended}",
        f"pressure  refused {figures['refused']}   retractions {figures['retractions']}",
        (
            f"rates     output {figures['output_tokens_per_s']:,.1f} tokens/s   steps {figures['steps_per_s']:.1f}/s   "
            f"prefix hits {_percent(figures['hit_rate'])}"
        ),
        (
            f"KV cache  [{bar}] {figures['kv_usage']:.0%} of {figures['kv_total_tokens']:,} tokens   "
            f"cached {figures['kv_cached_tokens']:,}"
        ),
        (
            f"latency   TTFT {_ms(figures['ttft_ms'])}   ITL {_ms(figures['itl_ms'])}   queue {_ms(figures['queue_ms'])}   "
            f"step {_ms(figures['step_ms'])}"
        ),
    ]


def _row(request: dict[str, Any]) -> str:
    ttft, tokens = request["first_output_seconds"], request["output_tokens"]
    since_first = request["seconds"] - ttft if ttft is not None else 0.0
    return COLUMNS.format(
        f"{request['seconds']:.1f}",
        request["prompt_tokens"],
        tokens if tokens or request["stream"] else "-",
        "-" if ttft is None else f"{1000 * ttft:.0f}",
        f"{(tokens - 1) / since_first:.1f}" if tokens > 1 and since_first > 0 else "-",
        request["label"] or request["rid"],
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
