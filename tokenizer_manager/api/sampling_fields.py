"""From the fields of a body to sampling parameters: over the model's defaults, checked, named as the client wrote them."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ...common.sampling_params import MAX_BAD_WORDS, InvalidParam, SamplingParams, check_sampling_params
from ...common.stop_regex import compile_stop_regexes
from ...common.tokenizer import Tokenizer, TokenizerError
from ..api_error import bad_request, unsupported

MAX_BAD_WORD_CHARS = 4096  # of all of a request's together: they are tokenized while the server waits
MAX_DIFFERENT_LISTS = 32  # of bad_words and of stop_regex in a call: some milliseconds each
TOKEN_ID = re.compile(r"[0-9]{1,10}")
Texts = tuple[str, ...]


class ReadOnce:
    """Reads lists of texts of one call, each different list once; so many of them that nobody waits for long."""

    def __init__(self, read: Callable[[Texts], Any]) -> None:
        self._read = read
        self._known: dict[Texts, Any] = {}

    def __call__(self, texts: Texts, param: str) -> Any:
        """What `read` makes of the texts; the APIError for one list too many names `param`."""
        if texts not in self._known:
            if len(self._known) == MAX_DIFFERENT_LISTS:
                raise bad_request(f"{param}: a call may bring at most {MAX_DIFFERENT_LISTS} different ones", param)
            self._known[texts] = self._read(texts)
        return self._known[texts]


class SamplingBase:
    """What the sampling fields of one call are read against: the model's vocabulary, its defaults, its tokenizer."""

    def __init__(self, vocab_size: int, defaults: SamplingParams, tokenizer: Tokenizer) -> None:
        self._vocab_size = vocab_size
        self._defaults = defaults
        self._words = ReadOnce(lambda words: _word_ids(words, tokenizer))
        self._regexes = ReadOnce(compile_stop_regexes)

    def params(
        self, given: Mapping[str, Any], names: Mapping[str, str], at: str = "", *, may_be_empty: bool = False
    ) -> SamplingParams:
        """SamplingParams' fields as they are given, the default for each None; APIError for what is out of range.

        `names` says how the client calls a field where that differs, `at` where the fields stand in the body.
        `may_be_empty`: whether no output may be asked for.
        """
        changes = {name: value for name, value in given.items() if value is not None}
        return self.checked(msgspec.structs.replace(self._defaults, **changes), names, at, may_be_empty=may_be_empty)

    def checked(
        self, params: SamplingParams, names: Mapping[str, str], at: str = "", *, may_be_empty: bool = False
    ) -> SamplingParams:
        """The params, or the APIError that names the field; see `params`."""
        try:
            if params.max_new_tokens == 0 and not may_be_empty:
                raise InvalidParam("max_new_tokens", "max_new_tokens must be at least 1, not 0")
            check_sampling_params(params, self._vocab_size)
            if params.stop_regex:
                self._regexes(params.stop_regex, _below(at, "stop_regex"))
        except InvalidParam as error:
            message = str(error)
            for ours, theirs in names.items():
                message = message.replace(ours, theirs)
            param = names.get(error.param, error.param)
            raise bad_request(message, _below(at, param)) from None
        return params

    def bad_words(self, given: Sequence[str] | None, at: str = "") -> tuple[tuple[int, ...], ...] | None:
        """The token ids of words, each as it stands at the beginning of a text and behind a space (as in vLLM).

        APIError for words that are empty, too many or too long together.
        """
        if given is None:
            return None
        param = _below(at, "bad_words")
        if len(given) > MAX_BAD_WORDS // 2:
            raise bad_request(f"at most {MAX_BAD_WORDS // 2} bad_words are allowed, not {len(given)}", param)
        if sum(map(len, given)) > MAX_BAD_WORD_CHARS:
            raise bad_request(f"bad_words may have at most {MAX_BAD_WORD_CHARS} characters together", param)
        words = tuple(word.lstrip() for word in given)
        if not all(words):
            raise bad_request("each of bad_words must have a character that is not a space", param)
        try:
            ids: tuple[tuple[int, ...], ...] = self._words(words, param)
        except TokenizerError as error:
            raise bad_request(f"bad_words: {error}", param) from None
        return ids


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """One stop string (or regex) or several."""
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def logit_bias(given: Mapping[str, float] | None, at: str = "") -> dict[int, float] | None:
    """OpenAI's `logit_bias`, whose keys are token ids as texts; APIError for any other key."""
    if given is None:
        return None
    for key in given:
        if not TOKEN_ID.fullmatch(key):
            message = f'logit_bias: {key[:40]!r} is not a token id; the keys are ids, as in {{"42": -100}}'
            raise bad_request(message, _below(at, "logit_bias"))
    found = {int(key): bias for key, bias in given.items()}
    if len(found) != len(given):
        raise bad_request("logit_bias names a token twice", _below(at, "logit_bias"))
    return found


def check_best_of(best_of: int | None, n: int | None) -> None:
    """APIError unless all answers that are made are wanted."""
    if best_of is not None and best_of != (n or 1):
        raise unsupported("best_of", f"best_of must equal n ({n or 1}), not {best_of}: every answer is returned")


def _word_ids(words: Texts, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    sequences = tokenizer.encode_batch([prefix + word for word in words for prefix in ("", " ")], False)
    return tuple(dict.fromkeys(tuple(ids) for ids in sequences if ids))


def _below(at: str, param: str) -> str:
    return f"{at}.{param}" if at else param
