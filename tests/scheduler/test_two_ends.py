"""Two ends of one request that meet, in every order: the real scheduler, the real detokenizer, late links between.

The scheduler ends by token (length, EOS, stop id) or by an abort, the detokenizer by text. Neither knows what the other
has decided; whatever the order, the client gets one answer, and the scheduler is clean afterwards. The cases are a
product; a case that fails is printed.
"""

import multiprocessing
import os
from collections import Counter, deque
from itertools import product
from typing import NamedTuple

import tokenizers

from millstream.common.finish_reason import (
    FINISH_ABORT,
    FINISH_LENGTH,
    FINISH_MATCHED_STR,
    FINISH_MATCHED_TOKEN,
    FINISHED_MATCHED_REGEX,
    FinishReason,
)
from millstream.common.messages import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
    pack_int32,
    unpack_int32,
)
from millstream.common.sampling_params import SamplingParams
from millstream.common.text_messages import BatchTokenIDOutput, StrOutput, TextEnded
from millstream.common.tokenizer import Tokenizer
from millstream.common.tokenizer_parts import TokenizerParts
from millstream.detokenizer.detokenizer import Detokenizer
from millstream.scheduler.invariants import broken_invariants
from millstream.scheduler.req import ReqStatus
from tests.scheduler.fake_worker import reference_outputs
from tests.scheduler.harness import VOCAB_SIZE, Harness

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX"  # the text of each token
NUM_PAGES = 16
TOKEN_END = 6  # the output that brings the token end
NEVER = 12
PROMPT = next(
    prompt
    for prompt in ([7, 8, n] for n in range(50))
    if len(set(reference_outputs(prompt, VOCAB_SIZE, NEVER))) == NEVER
)
OUTPUTS = reference_outputs(PROMPT, VOCAB_SIZE, NEVER)
TEXT = "".join(LETTERS[token_id] for token_id in OUTPUTS)
AT_THE_END = 10**6


class Disturbance(NamedTuple):
    """What else happens once the scheduler has `num_outputs`: a retraction, an abort, or both (while retracted)."""

    what: str
    num_outputs: int = 0
    drained: bool = False  # whether the steps in flight are let in before the abort


class Case(NamedTuple):
    """One order of ends. Delays are in rounds of the drive."""

    token_end: str  # length, eos, stop id or never
    text_end: int  # the output that completes the stop string or regex
    is_regex: bool
    disturbance: Disturbance
    token_delay: int  # of the tokens' way to the detokenizer
    notice_delay: int  # of the text end's way to the scheduler
    options: dict[str, int | bool]

    @property
    def params(self) -> SamplingParams:
        """A regex over two tokens, so that text is held back; a stop string of one."""
        last = OUTPUTS[TOKEN_END - 1]
        end = self.text_end
        return SamplingParams(
            max_new_tokens={"length": TOKEN_END}.get(self.token_end, NEVER),
            stop_token_ids=(last,) if self.token_end == "stop id" else (),
            stop=() if self.is_regex else (TEXT[end - 1],),
            stop_regex=(f"{TEXT[end - 2]}[{TEXT[end - 1]}]",) if self.is_regex else (),
        )

    @property
    def message(self) -> TokenizedGenerateReqInput:
        """The request."""
        return TokenizedGenerateReqInput(
            rid="r",
            frontend="http",
            arrival=0.0,
            input_ids=pack_int32(PROMPT),
            sampling_params=self.params,
            eos_token_ids=(OUTPUTS[TOKEN_END - 1],) if self.token_end == "eos" else (),
            stream=not self.is_regex,
        )


class Answer(NamedTuple):
    """What the client gets."""

    reason: FinishReason
    text: str
    output_ids: list[int]
    completion_tokens: int


def letters_tokenizer() -> Tokenizer:
    """One letter a token."""
    vocab = {letter: token_id for token_id, letter in enumerate(LETTERS)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(TokenizerParts(backend, {}, [], {}))


TOKENIZER = letters_tokenizer()


class Drive(Harness):
    """Scheduler, worker and detokenizer; what they send one another arrives when the case says so."""

    def __init__(self, case: Case) -> None:
        super().__init__(num_pages=NUM_PAGES, page_size=2, max_running_requests=2, check_every=3, **case.options)
        self.case = case
        self.detokenizer = Detokenizer(TOKENIZER)
        self.round = 0
        self.to_detokenizer: deque[tuple[int, BatchTokenIDOutput]] = deque()
        self.to_scheduler: deque[tuple[int, TextEnded]] = deque()
        self.outputs: list[StrOutput] = []
        self.num_sent = 0  # outputs that the scheduler let out
        self.abort_status: str | None = None  # where the request was when its abort came
        self.notice_status: str | None = None
        self.num_retractions = 0

    def _read(self, output: BatchTokenIDOutput) -> None:
        self.num_sent += len(output.token_ids) // 4
        self.to_detokenizer.append((self.round + self.case.token_delay, output))

    @property
    def status(self) -> str:
        """Where the scheduler has the request."""
        req = self.state.requests.get("r")
        if req is None:
            return "ENDED"
        return "IN FLIGHT" if req.status is ReqStatus.RUNNING and self.state.is_in_flight(req) else req.status.name

    def deliver(self, until: int) -> None:
        """What is due by this round arrives."""
        while self.to_detokenizer and self.to_detokenizer[0][0] <= until:
            done = self.detokenizer.handle(self.to_detokenizer.popleft()[1])
            self.outputs += done.outputs
            self.to_scheduler += [(self.round + self.case.notice_delay, each) for each in done.text_ends]
        while self.to_scheduler and self.to_scheduler[0][0] <= until:
            self.notice_status = self.status
            notice = self.to_scheduler.popleft()[1]
            for _ in range(2):  # it may come twice
                self.scheduler.handle(notice, self.now)
                self._collect()
                assert self.status in {"ENDING", "ENDED"}, "a text end is taken in every state"
                assert self.status == "ENDED" or self.req("r").num_outputs <= notice.num_tokens

    def run_case(self) -> None:
        """From the request to the last message."""
        self.send(self.case.message)
        is_disturbed = False
        for self.round in range(60):
            if not is_disturbed and self._is_time():
                is_disturbed = True
                self._disturb()
            while self.plan():
                if not is_disturbed and self._is_time() and not self.case.disturbance.drained:
                    is_disturbed = True
                    self._disturb()
            if self.results:
                self.answer()
            self.deliver(self.round)
        self.deliver(2 * AT_THE_END)
        assert is_disturbed or self.case.disturbance.what == "nothing" or self.status == "ENDED"
        while self.results or self.plan():
            self.answer()

    def _is_time(self) -> bool:
        what, num_outputs, _ = self.case.disturbance
        if what == "abort at the end":
            return self.status in {"ENDED", "ENDING"}
        return what != "nothing" and self.num_sent >= num_outputs

    def _disturb(self) -> None:
        what = self.case.disturbance.what
        if what.startswith("retract"):
            self._retract()
        elif self.case.disturbance.drained:
            self._drain()
        if "abort" in what:
            self.abort_status = self.status
            self.abort("r")
            self.abort("r")
        if what.startswith("retract"):
            self.deliver(self.round + 3)
            self.control(ContinueGenerationReqInput("go on", "http"))

    def _drain(self) -> None:
        while self.results:
            self.answer()

    def _retract(self) -> None:
        self.control(PauseGenerationReqInput("pause", "http", "retract"))
        self._drain()
        assert not self.plan()
        self.num_retractions += self.status == "RETRACTED"


def expected_answer(case: Case, num_sent: int, *, is_aborted: bool) -> Answer:
    """The text end, if its token was among those that the scheduler let out; else the scheduler's end."""
    end = case.text_end
    if end <= num_sent:
        start = end - 2 if case.is_regex else end - 1
        params = case.params
        text_end = FINISHED_MATCHED_REGEX(params.stop_regex[0]) if case.is_regex else FINISH_MATCHED_STR(TEXT[end - 1])
        return Answer(text_end, TEXT[:start], OUTPUTS[:end], end)
    reason: FinishReason
    text = TEXT[:num_sent]
    if is_aborted:
        reason = FINISH_ABORT("The request was aborted.", 499, "RequestAborted")
    elif case.token_end in {"eos", "stop id"}:
        reason, text = FINISH_MATCHED_TOKEN(OUTPUTS[TOKEN_END - 1]), TEXT[: num_sent - 1]
    else:
        reason = FINISH_LENGTH(num_sent)
    return Answer(reason, text, OUTPUTS[:num_sent], num_sent)


def check_answer(drive: Drive) -> None:
    """Exactly one end, in the last output; joined pieces are the text; counts are those of the tokens that count."""
    case = drive.case
    assert [output.end is not None for output in drive.outputs] == [False] * (len(drive.outputs) - 1) + [True]
    end = drive.outputs[-1].end
    assert end is not None
    is_aborted = drive.abort_status not in {None, "ENDED", "ENDING"}
    if case.token_end == "never":
        assert drive.num_sent <= NEVER
    elif is_aborted or case.text_end < TOKEN_END:
        assert drive.num_sent <= TOKEN_END
    else:
        assert drive.num_sent == TOKEN_END
    answer = Answer(
        end.finish_reason,
        "".join(output.text for output in drive.outputs),
        [token_id for output in drive.outputs for token_id in unpack_int32(output.token_ids)],
        end.completion_tokens,
    )
    assert answer == expected_answer(case, drive.num_sent, is_aborted=is_aborted)
    assert end.stats.prompt_tokens == len(PROMPT)
    assert 0 <= end.stats.num_retractions <= drive.num_retractions
    assert drive.detokenizer.num_open == 0


def check_clean(drive: Drive) -> None:
    """No request, no row, no page that could not be had; and what is cached serves a next turn rightly."""
    state = drive.state
    assert not state.requests
    assert not state.in_flight
    assert sorted(state.free_rows) == [0, 1]
    assert state.pool.num_available_pages == NUM_PAGES
    assert state.pool.tree_cache.protected_pages == 0
    assert broken_invariants(state) == []
    assert not drive.to_scheduler
    drive.num_sent = 0
    prompt = [*PROMPT, *OUTPUTS[: TOKEN_END - 2], 1]
    message = TokenizedGenerateReqInput("next", "http", 0.0, pack_int32(prompt), SamplingParams(max_new_tokens=3))
    drive.send(message)
    drive.run()
    drive.outputs.clear()
    drive.deliver(2 * AT_THE_END)
    ids = [token_id for output in drive.outputs for token_id in unpack_int32(output.token_ids)]
    assert ids == reference_outputs(prompt, VOCAB_SIZE, 3)


DISTURBANCES = [
    Disturbance("nothing"),
    Disturbance("abort", 0),
    Disturbance("abort", 1),
    *[Disturbance("abort", num_outputs, drained) for num_outputs, drained in product((4, 5), (False, True))],
    Disturbance("abort at the end"),
    *[Disturbance("retract", num_outputs) for num_outputs in (1, 4, 5)],
    Disturbance("retract and abort", 4),
]
DELAYS = [(0, 0), (0, 1), (0, 3), (0, AT_THE_END), (2, 0)]
OPTIONS: list[dict[str, int | bool]] = [{}, {"disable_overlap_schedule": True}, {"decode_width": 3}]


def all_cases() -> list[Case]:
    """The product."""
    text_ends = (TOKEN_END - 2, TOKEN_END - 1, TOKEN_END, TOKEN_END + 1)
    token_ends = ("length", "eos", "stop id", "never")
    parts = product(token_ends, text_ends, (False, True), DISTURBANCES, DELAYS, OPTIONS)
    return [Case(token_end, at, regex, what, *delays, options) for token_end, at, regex, what, delays, options in parts]


def run_case(case: Case) -> Counter[str]:
    """Where its abort and its notice came; AssertionError where anything is wrong."""
    drive = Drive(case)
    drive.run_case()
    check_answer(drive)
    check_clean(drive)
    return Counter([f"abort comes {drive.abort_status}", f"notice comes {drive.notice_status}"])


def run_share(cases: list[Case]) -> tuple[Counter[str], list[Case]]:
    """What was met, and the first case that fails."""
    seen: Counter[str] = Counter()
    for case in cases:
        try:
            seen += run_case(case)
        except AssertionError:
            return seen, [case]
    return seen, []


def test_two_ends_in_any_order_make_one_answer_and_leave_the_scheduler_clean() -> None:
    cases = all_cases()
    num_processes = os.cpu_count() or 1
    seen: Counter[str] = Counter()
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        for met, failed in pool.imap(run_share, [cases[index::num_processes] for index in range(num_processes)]):
            seen += met
            for case in failed:
                print(case)
                run_case(case)  # again, to be told what is wrong
    places = {"IN FLIGHT", "RUNNING", "RETRACTED", "ENDING", "ENDED"}
    for place in places:
        assert seen[f"abort comes {place}"], (place, seen)
        assert seen[f"notice comes {place}"], (place, seen)
    assert seen["abort comes WAITING"], seen
