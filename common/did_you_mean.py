"""The nearest of the names that there are, for a message about one that there is not."""

import difflib
from collections.abc import Iterable

LEAST_LIKENESS = 0.75  # from 0 to 1, difflib's


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """`; did you mean KNOWN?`, or nothing where none is near; all begin with `prefix`."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=LEAST_LIKENESS)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
