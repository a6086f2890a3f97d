"""What serving.py's measurements say: medians over the rounds, ratios to the best peer, shares of the floor."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from millstream.common.model_struct import ModelConfig
from tests.bench import floor
from tests.bench.floor import FORMATS, Rates, Requests
from tests.bench.serving_loads import COLD, SHARED_LEN
from tests.bench.serving_servers import OURS, PEERS

Result = dict[str, Any]
STORED = {"ours": ("bf16", "int4"), "ours-w8a8": ("w8a8",), "llama": ("int4",), "vllm": ("bf16",)}
WORKER = "tp_worker"


def tables(results: Sequence[Result], config: ModelConfig, rates: Rates) -> Iterator[str]:
    """Markdown, one table for each thing that was measured."""
    loads = [each for each in results if each["workload"] not in {"start", "long"}]
    if loads:
        yield load_table(loads, config, rates)
    long = [each for each in results if each["workload"] == "long"]
    if long:
        yield long_table(long)
    yield start_table([each for each in results if each["workload"] == "start"])
    ours = [each for each in loads if each["server"] in OURS and each["workload"] == "random"]
    if ours:
        yield process_table(ours)


def problems(results: Iterable[Result]) -> list[str]:
    """What makes a measurement worthless."""
    found = []
    for each in results:
        where = f"round {each['round']}, {each['server']}, {each['workload']} at {each.get('concurrency')}"
        if each.get("num_errors"):
            found.append(f"{where}: {each['num_errors']} requests failed: {each['first_error']}")
        if each.get("long_error"):
            found.append(f"{where}: {each['long_error']}")
        if each.get("prompt_tokens_off_by"):
            found.append(f"{where}: prompts are off by up to {each['prompt_tokens_off_by']} tokens")
        if each["workload"] in COLD and (each["cached_tokens"] or each.get("long_cached_tokens")):
            found.append(f"{where}: {each['cached_tokens']} prompt tokens came out of the cache")
    return found


def load_table(results: Sequence[Result], config: ModelConfig, rates: Rates) -> str:
    """Throughput, TTFT, TPOT. A ratio is ours over the best peer's; a floor is that of the server's weights."""
    rows = []
    for (workload, concurrency), of_load in _grouped(results, ("workload", "concurrency")):
        by_server = {server: of_server for (server,), of_server in _grouped(of_load, ("server",))}
        rates_of = {name: _median(each, _rate) for name, each in by_server.items()}
        ttft_of = {name: _median(each, _ttft) for name, each in by_server.items()}
        for server, each in by_server.items():
            is_ours = server in OURS
            rows.append([
                workload, str(concurrency), server,
                f"{rates_of[server]:.1f}", _ratio(server, rates_of, max) if is_ours else "",
                _floor_cell(server, of_load[0], config, rates, rates_of[server]),
                f"{ttft_of[server]:.0f}", _ratio(server, ttft_of, min) if is_ours else "",
                f"{_median(each, lambda one: one['tpot_ms']['p50']):.1f}",
                f"{_median(each, lambda one: one['itl_ms']['p99']):.1f}",
                _cached(each),
                f"{100 * _median(each, lambda one: one['client_cpu_share']):.0f} %",
            ])  # fmt: skip
    head = ["load", "concurrency", "server", "output tokens/s", "to best peer", "floor (share)", "TTFT p50 ms"]
    head += ["to best peer", "TPOT p50 ms", "ITL p99 ms", "cached tokens", "client's CPU"]
    return _markdown(head, rows)


def long_table(results: Sequence[Result]) -> str:
    """The eight streams beside the long prompt."""
    rows = []
    for (server,), each in _grouped(results, ("server",)):
        whole = [one for one in each if "during_itl_ms" in one]
        if not whole:
            continue
        spread = [
            f"{_median(whole, lambda one, k=k, p=p: one[k][p]):.1f}"
            for k in ("usual_itl_ms", "during_itl_ms")
            for p in ("p50", "p99")
        ]
        ratios = [
            f"{_median(whole, lambda one, k=k: one[k]):.2f}"
            for k in ("during_p99_to_usual_p99", "during_p99_to_usual_p50")
        ]
        rows.append([server, *spread, *ratios, f"{_median(whole, lambda one: one['long_ttft_ms']):.0f}"])
    head = [
        "server",
        "usual ITL p50 ms",
        "p99",
        "beside the long prompt p50",
        "p99",
        "p99 to usual p99",
        "p99 to usual p50",
    ]
    return _markdown([*head, "TTFT of the long prompt ms"], rows)


def start_table(results: Sequence[Result]) -> str:
    """Seconds from the command to the first 200."""
    rows = [
        [server, f"{statistics.median(one['start_to_ready_s'] for one in each):.1f}"]
        for (server,), each in _grouped(results, ("server",))
    ]
    return _markdown(["server", "start to ready s"], rows)


def process_table(results: Sequence[Result]) -> str:
    """CPU seconds of our processes, all rounds together, and the share of those beside the workers."""
    rows = []
    for (server, concurrency), each in _grouped(results, ("server", "concurrency")):
        names = sorted({name for one in each for name in one["server_cpu_seconds"]})
        total = {name: sum(one["server_cpu_seconds"].get(name, 0.0) for one in each) for name in names}
        seconds = ", ".join(f"{name} {value:.1f}" for name, value in total.items())
        rows.append([server, str(concurrency), seconds, f"{100 * others_share(total):.1f} %"])
    return _markdown(["server", "concurrency", "CPU seconds", "share of all but the workers"], rows)


def others_share(seconds: dict[str, float]) -> float:
    """Of all CPU time, what the processes beside the workers took."""
    total = sum(seconds.values())
    return sum(value for name, value in seconds.items() if not name.startswith(WORKER)) / total if total else 0.0


def floor_of(result: Result, stored: str, config: ModelConfig, rates: Rates) -> float:
    """Output tokens a second that no server can exceed with weights that are stored so."""
    is_shared, is_warm = result["workload"] == "shared", result["workload"] == "warm"
    output_len = round(result["output_tokens"] / (result["num_requests"] - result["num_errors"]))
    prompt_len = result["wanted_prompt_tokens"]
    shared_len = SHARED_LEN if is_shared else prompt_len - 1 if is_warm else 0
    requests = Requests(result["concurrency"], prompt_len, output_len, shared_len)
    return floor.output_tokens_per_s(config, FORMATS[stored], requests, rates)


def _floor_cell(server: str, result: Result, config: ModelConfig, rates: Rates, reached: float) -> str:
    floors = {stored: floor_of(result, stored, config, rates) for stored in STORED[server]}
    return ", ".join(f"{stored} {value:.0f} ({reached / value:.2f})" for stored, value in floors.items())


def _ratio(server: str, values: dict[str, float], best: Callable[[Iterable[float]], float]) -> str:
    """Ours over the best peer's, where a peer was measured."""
    peers = [value for name, value in values.items() if name in PEERS]
    return f"{values[server] / best(peers):.2f}x" if peers else ""


def _cached(results: Sequence[Result]) -> str:
    known = [each["cached_tokens"] for each in results if each["cached_tokens"] is not None]
    return f"{statistics.median(known):.0f}" if known else "not told"


def _median(results: Iterable[Result], value: Callable[[Result], float]) -> float:
    return statistics.median(value(each) for each in results)


def _rate(result: Result) -> float:
    return float(result["output_tokens_per_s"])


def _ttft(result: Result) -> float:
    return float(result["ttft_ms"]["p50"])


def _grouped(results: Iterable[Result], keys: tuple[str, ...]) -> list[tuple[tuple[Any, ...], list[Result]]]:
    groups: dict[tuple[Any, ...], list[Result]] = {}
    for each in results:
        groups.setdefault(tuple(each[key] for key in keys), []).append(each)
    return list(groups.items())


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
