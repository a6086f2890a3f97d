"""tests/bench/kernels.py stays whole."""

from tests.bench import kernels


def test_every_operator_is_timed() -> None:
    operators = kernels.catalogue()
    assert len(operators) > 10
    assert kernels.without_case(operators) == []
