"""How figures become cells of a table, and cells a table in Markdown. What was not measured is a blank cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.timing import Timing


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; every row has as many cells as the header.

    >>> print(markdown(["a", "b"], [["1", ""]]))
    | a | b |
    |---|---|
    | 1 |  |
    """
    lines = [header, *rows]
    if any(len(line) != len(header) for line in lines):
        raise ValueError(f"expected {len(header)} cells in every row")
    written = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([written[0], "|" + "---|" * len(header), *written[1:]])


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A cell; blank where there is nothing."""
    return "" if value is None else f"{value:.{digits}f}{unit}"


def times(part: float | None, whole: float | None, digits: int = 2) -> str:
    """How often `whole` goes into `part`; blank where one of them is missing."""
    return "" if part is None or whole is None else f"{part / whole:.{digits}f} x"


def with_spread(timing: Timing | None, factor: float = 1.0, digits: int = 2) -> str:
    """The best, and how much longer the median turn took: `1.50 +4 %`."""
    return "" if timing is None else f"{timing.best * factor:.{digits}f} +{100 * timing.spread:.0f} %"
