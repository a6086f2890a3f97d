"""Text that came from elsewhere, made safe for a terminal."""

KEPT = frozenset("\n\t")


def printable(text: str, *, keep_lines: bool = False) -> str:
    """The text without what would steer the terminal; `keep_lines` leaves line ends and tabs."""
    return "".join(char if char.isprintable() or (keep_lines and char in KEPT) else "?" for char in text)
