"""Typed and bounded access to the values of a model's configuration."""

import math
from collections.abc import Mapping
from typing import Any

from .model_error import ModelError

REQUIRED = object()


class Fields:
    """Values by name from one source (a JSON file, GGUF metadata). A null counts as absent. Raises ModelError."""

    def __init__(self, source: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.source = source
        self._values = values
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._values.get(self._prefix + name) is not None

    def present(self) -> dict[str, Any]:
        """All values that are not null."""
        return {name: value for name, value in self._values.items() if value is not None}

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it stands."""
        value = self._values.get(self._prefix + name)
        if value is None and default is REQUIRED:
            raise ModelError(f"{self.source}: {self._prefix + name} is missing")
        return default if value is None else value

    def integer(self, name: str, default: Any = REQUIRED, *, low: int = 1, high: int) -> int:
        """A whole number from `low` to `high`."""
        value = self.raw(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.bad(name, f"a whole number from {low} to {high}", value)
        return value

    def number(self, name: str, default: Any = REQUIRED, *, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number above `low` (exclusive) and up to `high`."""
        value = self.raw(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low < value <= high or not math.isfinite(value):
            raise self.bad(name, f"a number above {low:g} and up to {high:g}", value)
        return float(value)

    def boolean(self, name: str, default: Any = REQUIRED) -> bool:
        """True or false."""
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.bad(name, "true or false", value)
        return value

    def string(self, name: str, default: Any = REQUIRED) -> str:
        """A text."""
        value = self.raw(name, default)
        if not isinstance(value, str):
            raise self.bad(name, "a string", value)
        return value

    def section(self, name: str) -> "Fields":
        """A nested object, empty where it is absent."""
        value = self.raw(name, {})
        if not isinstance(value, dict):
            raise self.bad(name, "an object", value)
        return Fields(f"{self.source}: {name}", value)

    def bad(self, name: str, wanted: str, value: Any) -> ModelError:
        """The exception for a value that is not what is wanted."""
        return ModelError(f"{self.source}: {self._prefix + name} must be {wanted}, not {repr(value)[:80]}")
