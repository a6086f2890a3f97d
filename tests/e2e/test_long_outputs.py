"""No stage's cost of a token grows with the tokens before it: CPU time at the end of a long output and at its start.

Each stage alone, in this process. A stage that looked at the whole output for every token would cost ten times as much
at the end; the slack is twofold, and the least of many short stretches is compared, which other work does not raise.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import tokenizers

from millstream.common.batch_messages import BatchResult, ScheduleBatch
from millstream.common.messages import (
    DetokenizerReady,
    SchedulerReady,
    TokenizedGenerateReqInput,
    pack_int32,
    unpack_int32,
)
from millstream.common.sampling_params import SamplingParams
from millstream.common.text_messages import BatchStrOutput, BatchTokenIDOutput, StrOutput
from millstream.detokenizer.detokenizer import Detokenizer
from millstream.scheduler.scheduler import Scheduler
from millstream.scheduler.scheduler_config import SchedulerConfig
from millstream.tokenizer_manager.api.openai_chat_format import ChatResponse
from millstream.tokenizer_manager.call import Call
from millstream.tokenizer_manager.chat.chat_generation import ChatGeneration
from millstream.tokenizer_manager.chat.delta import PlainParser
from millstream.tokenizer_manager.families import GenerateReq
from millstream.tokenizer_manager.metrics import Metrics
from millstream.tokenizer_manager.tokenizer_manager import TokenizerManager
from tests.detokenizer.reference_text import start_of
from tests.text.sample_tokenizers import byte_level_backend, metaspace_backend, tokenizer_of
from tests.tokenizer_manager.live_server import byte_tokenizer

NUM_TOKENS = 8000
STRETCH = 50  # tokens
NUM_STRETCHES = 16  # at each end
SLACK = 2.0
ONE = pack_int32([1])
ZERO = pack_int32([0])


@contextmanager
def without_collections() -> Iterator[None]:
    """Garbage collections come when they like."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def check_flat(step: Callable[[int], object]) -> None:
    """`step(i)` brings token i."""
    stretches: list[float] = []
    with without_collections():
        for first in range(0, NUM_TOKENS, STRETCH):
            start = time.process_time()
            for index in range(first, first + STRETCH):
                step(index)
            stretches.append(time.process_time() - start)
    early, late = min(stretches[1 : 1 + NUM_STRETCHES]), min(stretches[-NUM_STRETCHES:])
    assert late < SLACK * early, f"{STRETCH} tokens cost {1e6 * early:.0f} us at the start, {1e6 * late:.0f} at the end"


@pytest.mark.parametrize("backend", [byte_level_backend(), metaspace_backend()], ids=["bytes", "window"])
@pytest.mark.parametrize("stop", [(), ("never \x00 there", "nor this")], ids=["", "stop strings"])
@pytest.mark.parametrize("stop_regex", [(), ("[0-9]{3}:",)], ids=["", "stop regex"])
def test_the_detokenizer(backend: tokenizers.Tokenizer, stop: tuple[str, ...], stop_regex: tuple[str, ...]) -> None:
    tokenizer = tokenizer_of(backend)
    ids = tokenizer.encode("some words that come again and again ", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    starts = [start_of("r", stop=stop, stop_regex=stop_regex)]
    detokenizer.handle(BatchTokenIDOutput(starts, [], b"", b"", b"", b"", []))
    packed_ids = [pack_int32([token_id]) for token_id in ids]

    def step(index: int) -> None:
        message = BatchTokenIDOutput([], ["r"], ZERO, ZERO, ONE, packed_ids[index % len(ids)], [])
        detokenizer.handle(message)

    check_flat(step)
    assert detokenizer.num_open == 1


def test_the_tokenizer_manager_and_its_stream() -> None:
    sent: list[object] = []
    manager = TokenizerManager(served_model_names=["m"], send=sent.append, metrics=Metrics("m"))
    manager.set_tokenizer(byte_tokenizer())
    manager.on_message(SchedulerReady(1000, 16, 257, 2 * NUM_TOKENS, 8, 1000))
    manager.on_message(DetokenizerReady())
    request = GenerateReq(input_ids=[1, 2, 3], sampling_params=SamplingParams())

    async def stream() -> None:
        with manager.generate(Call(0.0, "call"), [request], stream=True) as generation:
            chat = ChatGeneration(generation, [PlainParser()], byte_tokenizer(), request.sampling_params)
            events = ChatResponse(chat, "call", "m").events(include_usage=True)

            def step(index: int) -> None:
                text = f"text {index}, of a length that a copy for every token would show; ".rjust(200)
                manager.on_message(BatchStrOutput([StrOutput("call", text, ONE)]))
                with pytest.raises(StopIteration) as done:  # it need not wait
                    anext(events).__await__().send(None)
                assert text.encode() in done.value.value

            check_flat(step)

    asyncio.run(stream())


def test_the_scheduler() -> None:
    """With a page more in the radix tree every 16 tokens, and both messages encoded."""
    config = SchedulerConfig(
        num_pages=4096, page_size=16, vocab_size=100, context_len=4 * NUM_TOKENS, max_running_requests=4
    )
    scheduler = Scheduler(config)
    params = SamplingParams(max_new_tokens=2 * NUM_TOKENS)
    scheduler.handle(TokenizedGenerateReqInput("r", "http", 0.0, pack_int32([1, 2, 3]), params), 0.0)

    def step(index: int) -> None:
        now = 0.01 * index
        batch = scheduler.get_next_batch_to_run(now)
        assert batch is not None
        scheduler.process_batch_result(one_token(batch, index % 100), now)
        output = scheduler.take_output()
        assert output is not None
        assert unpack_int32(output.token_ids) == [index % 100]

    check_flat(step)
    assert len(scheduler.state.requests["r"].page_ids) > NUM_TOKENS / 16


def one_token(batch: ScheduleBatch, token_id: int) -> BatchResult:
    """The result of a step with one row, of generation 1."""
    rows = batch.extend_rows + batch.decode_rows
    return BatchResult(batch.step, rows, ONE, ONE, pack_int32([token_id]), ZERO, ZERO, {}, 0.01)
