"""`millstream simulate --fit`: a recorded run becomes a cost model, and what the model gets wrong is said."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ...common.flags import ConfigError
from ..recording.recording import Recording, read_recording
from .cost_fit import KindError, fit_cost_model, fit_errors
from .cost_model import CostModel, encode_cost_model
from .recorded_steps import read_steps
from .simulate_args import SimulateArgs

LARGE_PERCENT = 50  # an error at the 90th percentile of a kind of steps that is worth a warning


def fit(args: SimulateArgs, base: CostModel) -> int:
    """Fit, write, and print the errors; ConfigError where the file exists or cannot be made. Returns 0."""
    assert args.fit is not None
    assert args.out is not None
    out = Path(args.out)
    if out.exists():
        raise ConfigError(f"--out {out}: the file exists, and is not overwritten")
    recording = read_recording(Path(args.fit))
    run = read_steps(recording, recording.header.config.max_running_requests)
    description = f"{base.description.split(' Fitted ')[0]} Fitted to {len(run.steps)} steps of a recorded run."
    costs = fit_cost_model(base, run, description)
    try:
        with out.open("xb") as file:
            file.write(encode_cost_model(costs))
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror or error}") from error
    errors = fit_errors(costs, run)
    for found in errors:
        print(msgspec.json.encode(found).decode() if args.json else _in_words(found))
    print(f"wrote {out}: {args.cost_model} with the times of {args.fit}", file=sys.stderr if args.json else sys.stdout)
    for warning in _warnings(args, base, recording, errors):
        print(f"millstream simulate: warning: {warning}", file=sys.stderr)
    return 0


def _in_words(found: KindError) -> str:
    return (
        f"{found.kind:<8} {found.num_steps:>6} steps: off by {found.median_percent:.1f} % (median), "
        f"{found.p90_percent:.1f} % (p90), {found.total_percent:+.1f} % of their time in all"
    )


def _warnings(args: SimulateArgs, base: CostModel, recording: Recording, errors: list[KindError]) -> Iterator[str]:
    vocab_size = recording.header.config.vocab_size
    if vocab_size not in {base.model.vocab_size, base.model.vocab_size + 1}:  # a simulation adds EOS
        yield (
            f"the recorded model has a vocabulary of {vocab_size:,}, and --cost-model {args.cost_model} one of "
            f"{base.model.vocab_size:,}: another model's sizes make a cost model of neither"
        )
    large = [found for found in errors if found.p90_percent > LARGE_PERCENT]
    if large:
        told = ", ".join(f"{found.kind} {found.p90_percent:.0f} %" for found in large)
        yield f"the fit is far from a tenth of the recorded steps (p90: {told}); was the machine busy with other work?"
