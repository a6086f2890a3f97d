"""A histogram that takes many equal observations at the price of one: a token of every stream is one a step."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Histogram(Collector):
    """One series; `buckets` are upper bounds in ascending order, and one without a bound follows them."""

    def __init__(self, name: str, description: str, label: tuple[str, str], buckets: Sequence[float]) -> None:
        self._name = name
        self._description = description
        self._label = label
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        """Count `value` so many times."""
        self._counts[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """What Prometheus reads: for each bound how many observations were at most that."""
        label, value = self._label
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._description, labels=[label])
        family.add_metric([value], list(zip(names, accumulate(self._counts), strict=True)), self._sum)
        yield family
