"""How much of their remaining output the running requests are expected to use: SGLang's tracker and constants."""

from collections.abc import Collection

from .req import Req

INIT_RATIO = 0.7
MIN_RATIO_FACTOR = 0.14
DECAY_STEPS = 600
RETRACT_DECODE_STEPS = 20


class NewTokenRatio:
    """Falls a little with every decode step that went well, rises when requests had to be retracted."""

    def __init__(self, schedule_conservativeness: float) -> None:
        self._init = min(INIT_RATIO * schedule_conservativeness, 1.0)
        self._min = self._init * MIN_RATIO_FACTOR
        self._decay = (self._init - self._min) / DECAY_STEPS
        self.value = self._init

    def on_decode_step(self) -> None:
        """A decode step found the pages that it needed."""
        self.value = max(self.value - self._decay, self._min)

    def on_retract(self, remaining: Collection[Req]) -> None:
        """Expect at least what those that remain have shown, and some steps more.

        SGLang takes what they have shown even where that is less than what was expected; right after memory ran out,
        expecting less would only make it run out again.
        """
        num_decoded = sum(req.num_outputs for req in remaining)
        num_max_new = sum(req.max_new_tokens for req in remaining)
        shown = (num_decoded + RETRACT_DECODE_STEPS * len(remaining)) / (num_max_new + 1)
        self.value = max(self.value, min(shown, 1.0))

    def reset(self) -> None:
        """The server is idle."""
        self.value = self._init
