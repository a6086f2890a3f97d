"""Grammars in the worker: a row's tokens follow its grammar in any batch, cut or resumed anywhere, and it ends with it."""

import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from llguidance import LLMatcher

from millstream.common.batch_messages import ROW_ERROR, ROW_GRAMMAR_ENDED, ROW_REFUSED, BatchResult, GrammarReady
from millstream.common.grammar_tokenizer import make_grammar_tokenizer, parser_limits
from millstream.common.messages import unpack_int32
from millstream.common.sampling_params import SamplingParams
from millstream.common.tokenizer import Tokenizer, TokenizerError
from millstream.tp_worker.grammar import EndWords, Grammars
from millstream.tp_worker.rows import BatchError
from millstream.tp_worker.worker import Worker
from tests.text.sample_tokenizers import byte_level_backend, tokenizer_of
from tests.tp_worker.driver import Driver, load_tiny_worker, read, tiny_args
from tests.tp_worker.ranks import run_ranks

EOS = 2
VOCAB_SIZE = 300
PROMPT = [10, 20, 30, 40, 50, 60, 70]
HOT = SamplingParams(temperature=3.0, seed=5)
DEADLINE_SECONDS = 30
TOKENIZER = tokenizer_of(byte_level_backend())


def regex(pattern: str) -> str:
    """llguidance's grammar of a regex."""
    return msgspec.json.encode({"grammars": [{"lark_grammar": f"start: /{pattern}/"}]}).decode()


def fresh(worker: Worker) -> Worker:
    """The worker with no grammars, and a tokenizer that fits its vocabulary."""
    worker.grammars = Grammars(VOCAB_SIZE, lambda: TOKENIZER, 1)
    return worker


@pytest.fixture
def driver(worker: Worker) -> Iterator[Driver]:
    """Over a worker without grammars, which gets its own ones back."""
    own = worker.grammars
    yield Driver(fresh(worker))
    assert worker.grammars is not None
    worker.grammars.close()
    worker.grammars = own


def announce(driver: Driver, *grammars: str) -> list[GrammarReady]:
    """Tell the worker of grammars numbered from 0, and wait until it has compiled them."""
    news = dict(enumerate(grammars))
    assert driver.worker.run_step(msgspec.structs.replace(driver.batch(), new_grammars=news)) is None
    driver.next_step += 1
    ready: list[GrammarReady] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(ready) < len(grammars):
        assert time.monotonic() < deadline, ready
        time.sleep(0.001)
        ready += driver.worker.take_ready_grammars()
    return ready


def ended_rows(result: BatchResult | None) -> list[int]:
    """Rows whose grammar allows nothing more."""
    assert result is not None
    rows = zip(unpack_int32(result.rows), unpack_int32(result.flags), strict=True)
    return [row for row, flag in rows if flag & ROW_GRAMMAR_ENDED]


def finish(driver: Driver, rows: dict[int, int], num_tokens: int = 60) -> dict[int, list[int]]:
    """Prefill new rows (row -> known tokens) and decode each until its grammar or an EOS ends it; their outputs."""
    outputs: dict[int, list[int]] = {row: [] for row in rows}
    result = driver.step({row: range(length) for row, length in rows.items()})
    left = list(rows)
    for _ in range(num_tokens):
        for row, tokens in read(result).tokens.items():
            outputs[row] += tokens
        ended = ended_rows(result)
        left = [row for row in left if row not in ended and outputs[row][-1] != EOS]
        if not left:
            break
        result = driver.step(decodes=left)
    return outputs


def text(token_ids: list[int]) -> str:
    """Without special tokens."""
    return TOKENIZER.decode(token_ids)


def test_hot_rows_follow_their_grammars_and_a_row_without_one_is_left_alone(driver: Driver) -> None:
    driver.add(0, PROMPT, HOT)
    expected = driver.generate({0: len(PROMPT)}, 8)[0]
    driver.free(0)
    patterns = ["[0-9]{3}-[a-f]{2,9}", "(yes|no|maybe)", r'\{"a": [0-9]{1,9}\}', "[a-z]{20}"]
    assert all(message.error is None for message in announce(driver, *map(regex, patterns)))
    for row in range(12):
        params = msgspec.structs.replace(HOT, seed=row, repetition_penalty=1.3, presence_penalty=0.5)
        driver.add(row, [*PROMPT, row], params, grammar=row % 4, end_token_ids=(EOS,), generation=2)
    driver.add(20, PROMPT, HOT)
    rows = {row: len(PROMPT) + 1 for row in range(12)} | {20: len(PROMPT)}
    outputs = finish(driver, rows)
    for row in range(12):
        pattern = patterns[row % 4]
        assert re.fullmatch(pattern, text(outputs[row])), (pattern, text(outputs[row]))
    assert outputs[20][:8] == expected


def test_a_chunked_prompt_gives_the_same_tokens_and_its_middle_chunks_need_no_mask(driver: Driver) -> None:
    announce(driver, regex("[a-z]{12}"))
    driver.add(0, PROMPT, HOT, grammar=0)
    expected = finish(driver, {0: len(PROMPT)})[0]
    driver.free(0)
    driver.add(1, PROMPT, HOT, grammar=0)
    assert read(driver.step({1: range(4)})).tokens == {1: []}
    tokens = read(driver.step({1: range(4, 7)})).tokens[1]
    while len(tokens) < len(expected):
        tokens += read(driver.step(decodes=[1])).tokens[1]
    assert tokens == expected


@pytest.mark.parametrize("num_outputs", [1, 4, 11])
def test_a_resumed_row_goes_on_where_it_was(driver: Driver, num_outputs: int) -> None:
    announce(driver, regex("[a-z]{3}([0-9]{2}[A-Z]){4}"))
    driver.add(0, PROMPT, HOT, grammar=0)
    outputs = finish(driver, {0: len(PROMPT)})[0]
    driver.free(0)
    known = [*PROMPT, *outputs[:num_outputs]]
    driver.add(1, known, HOT, grammar=0, prompt_len=len(PROMPT))
    assert finish(driver, {1: len(known)})[1] == outputs[num_outputs:]


def test_a_row_that_has_ended_may_be_computed_once_more(driver: Driver) -> None:
    announce(driver, regex("[0-9]"))
    driver.add(0, PROMPT, HOT, grammar=0)
    result = driver.step({0: range(7)})
    assert ended_rows(result) == [0]
    late = driver.step(decodes=[0])  # it was planned before the result was known; what it brings is dropped
    assert not read(late).errors
    assert ended_rows(late) == [0]


def test_no_end_before_min_new_tokens_but_that_of_the_grammar(driver: Driver) -> None:
    announce(driver, regex("[0-9]*"), regex("[0-9]{2}"))
    eager = msgspec.structs.replace(HOT, min_new_tokens=9, logit_bias={EOS: 100.0}, temperature=0.0)
    for row in (0, 1):
        driver.add(row, PROMPT, eager, grammar=row, end_token_ids=(EOS,))
    outputs = finish(driver, {0: 7, 1: 7})
    assert outputs[0].index(EOS) == len(outputs[0]) - 1 == 9
    assert re.fullmatch("[0-9]{2}", text(outputs[1]))


def test_an_ignored_eos_does_not_come_unless_nothing_else_may(driver: Driver) -> None:
    announce(driver, regex("[0-9]*"))
    params = msgspec.structs.replace(HOT, ignore_eos=True, logit_bias={EOS: 100.0})
    driver.add(0, PROMPT, params, grammar=0)
    outputs = finish(driver, {0: 7}, 20)[0]
    assert len(outputs) == 20
    assert EOS not in outputs


def test_outputs_that_are_not_the_grammars_fail_their_row_alone(driver: Driver) -> None:
    announce(driver, regex("[0-9]{5}"))
    bad = [*PROMPT, *TOKENIZER.encode("x", add_special_tokens=False)]
    driver.add(0, bad, HOT, grammar=0, prompt_len=len(PROMPT))
    driver.add(1, PROMPT, HOT, grammar=0)
    result = driver.step({0: range(8), 1: range(7)})
    assert unpack_int32(result.flags if result else b"") == [ROW_ERROR, 0]
    outcome = read(result)
    assert outcome.tokens[0] == []
    assert outcome.errors[0].startswith("the grammar failed")
    again = driver.step(decodes=[0, 1])
    assert unpack_int32(again.flags if again else b"") == [ROW_ERROR, 0]


def test_a_grammar_that_grows_too_large_fails_its_row_alone(driver: Driver) -> None:
    wide = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(1500)}}
    announce(driver, msgspec.json.encode({"grammars": [{"json_schema": wide}]}).decode())
    driver.add(0, PROMPT, HOT, grammar=0)
    driver.add(1, PROMPT, HOT)
    assert read(driver.step({0: range(7)})).tokens[0]
    result = driver.step({1: range(7)}, [0])
    assert unpack_int32(result.flags if result else b"") == [0, ROW_ERROR | ROW_REFUSED]
    assert "max is" in read(result).errors[0]
    assert read(driver.step(decodes=[0, 1])).tokens[1]


def test_bias_that_forbids_all_that_the_grammar_allows_is_an_error(driver: Driver) -> None:
    announce(driver, regex("7"))
    words = tuple((token_id,) for token_id in range(VOCAB_SIZE) if "7" in text([token_id]))
    driver.add(0, PROMPT, msgspec.structs.replace(HOT, bad_words=words), grammar=0)
    result = driver.step({0: range(7)})
    assert unpack_int32(result.flags if result else b"") == [ROW_ERROR | ROW_REFUSED]
    outcome = read(result)
    assert outcome.tokens == {0: []}
    assert "bad_words" in outcome.errors[0]


def test_a_matcher_that_fails_in_mid_answer_allows_nothing_and_its_row_says_so(driver: Driver) -> None:
    announce(driver, regex("[0-9]{5}"))
    for row in (0, 1):
        driver.add(row, [*PROMPT, row], HOT, grammar=0)
    driver.step({0: range(8), 1: range(8)})
    grammars = driver.worker.grammars
    assert grammars is not None
    assert not grammars._rows[0].matcher.consume_token(TOKENIZER.encode("x", add_special_tokens=False)[0])
    outcome = read(driver.step(decodes=[0, 1]))
    assert outcome.tokens[0] == []
    assert outcome.errors[0].startswith("the grammar failed: ")
    assert len(outcome.tokens[1]) == 1
    assert 1 not in outcome.errors


def test_a_grammar_that_can_not_be_compiled_says_why(driver: Driver) -> None:
    messages = announce(driver, regex("("), regex("[0-9]"), "{")
    assert [message.number for message in messages] == [0, 1, 2]
    assert [message.error is None for message in messages] == [False, True, False]
    driver.add(0, PROMPT, HOT, grammar=0)
    with pytest.raises(BatchError, match="grammar 0, which is not ready"):
        driver.step({0: range(7)})


def test_without_a_tokenizer_every_grammar_is_refused(worker: Worker) -> None:
    def fail() -> Tokenizer:
        raise TokenizerError("there is none")

    own, worker.grammars = worker.grammars, Grammars(VOCAB_SIZE, fail, 1)
    try:
        assert announce(Driver(worker), regex("[0-9]"))[0].error == "TokenizerError: there is none"
    finally:
        worker.grammars.close()
        worker.grammars = own


def test_a_freed_grammar_is_gone_and_its_rows_go_on(driver: Driver) -> None:
    announce(driver, regex("[0-9]{4}"))
    driver.add(0, PROMPT, HOT, grammar=0)
    tokens = read(driver.step({0: range(7)})).tokens[0]
    driver.worker.run_step(msgspec.structs.replace(driver.batch(), freed_grammars=np.int32(0).tobytes()))
    driver.next_step += 1
    while len(text(tokens)) < 4:
        tokens += read(driver.step(decodes=[0])).tokens[0]
    assert re.fullmatch("[0-9]{4}", text(tokens))
    driver.add(1, PROMPT, HOT, grammar=0)
    with pytest.raises(BatchError, match="not ready"):
        driver.step({1: range(7)})


def test_end_words_are_cleared_unless_nothing_else_is_left() -> None:
    words = EndWords((0, 31, 63, 64))
    mask = np.array([-1, -1, -1], np.int32)
    words.clear(mask)
    assert mask.view(np.uint32).tolist() == [2**31 - 2, 2**31 - 1, 2**32 - 2]
    alone = np.array([1, 0, 0], np.int32)
    words.clear(alone)
    assert alone.tolist() == [1, 0, 0]


def test_what_a_grammar_keeps_of_the_rows_that_followed_it_is_bounded() -> None:
    tokenizer = make_grammar_tokenizer(TOKENIZER, VOCAB_SIZE)
    compiled = LLMatcher(tokenizer, regex("[a-z ]*a[a-z ]{900}c"), log_level=0, limits=parser_limits())
    letters, draw, process = text_ids("abcdefgh"), random.Random(0), psutil.Process()
    before = process.memory_info().rss
    for _ in range(200):
        matcher, num_tokens = compiled.deep_copy(), 0
        while num_tokens < 800 and matcher.consume_token(draw.choice(letters)):
            matcher.compute_bitmask()
            num_tokens += 1
        if num_tokens < 800:
            break
    assert matcher.get_error().startswith("lexer error: too many states")
    assert (process.memory_info().rss - before) / 2**20 < 40


def text_ids(characters: str) -> list[int]:
    """The token of each character."""
    return [TOKENIZER.encode(each, add_special_tokens=False)[0] for each in characters]


def test_a_grammar_is_freed_once_it_is_there(driver: Driver) -> None:
    with pytest.raises(BatchError, match="grammar 5 is freed, which is not ready"):
        driver.worker.run_step(msgspec.structs.replace(driver.batch(), freed_grammars=np.int32(5).tobytes()))


def tokens_of_rank(tiny_model: Path, size: int, rank: int, memory: int) -> list[int]:
    """The outputs of a row with a grammar; rank 0 alone has the grammar, all have the tokens."""
    worker = load_tiny_worker(tiny_args(tiny_model, tp_size=size), rank, memory)
    if rank == 0:
        fresh(worker)
    driver = Driver(worker)
    news = {0: regex("[0-9]{3}[a-z]{5}x")}
    worker.run_step(msgspec.structs.replace(driver.batch(), new_grammars=news))
    deadline = time.monotonic() + DEADLINE_SECONDS
    while rank == 0 and not worker.take_ready_grammars():
        assert time.monotonic() < deadline
    driver.next_step += 1
    driver.add(0, PROMPT, HOT, grammar=0)
    driver.step({0: range(7)})
    tokens = [int(worker.rows.last_tokens[0])]
    for _ in range(8):
        driver.step(decodes=[0])
        tokens.append(int(worker.rows.last_tokens[0]))
    return tokens


def test_two_ranks_give_the_tokens_of_one(tiny_model: Path) -> None:
    expected = tokens_of_rank(tiny_model, 1, 0, -1)
    memory = os.memfd_create("test")
    try:
        ranks = run_ranks(2, lambda rank: tokens_of_rank(tiny_model, 2, rank, memory))
    finally:
        os.close(memory)
    assert ranks == [expected, expected]
    assert re.match("[0-9]{3}[a-z]{5}x", text(expected))
