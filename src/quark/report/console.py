"""Tables and lines printed by rich, safe for names from untrusted files.

A name can contain rich's markup or control characters of a terminal. Consoles made here interpret no markup and show
control characters as escapes; `cell` is the only way to give text a style.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from quark.text import printable

__all__ = ["Console", "Table", "cell", "plain_table"]


class Console(RichConsole):
    """A console for names from untrusted files."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def say(self, text: str = "", style: str = "") -> None:
        """Print one line without wrapping it, so that commands and paths can be copied."""
        self.print(cell(text, style), soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return the text of a string, such as a table cell; line breaks are kept."""
        shown = "\n".join(map(printable, text.split("\n")))
        return super().render_str(shown, **{**options, "markup": False, "emoji": False})


def cell(text: str, style: str = "") -> Text:
    """Return text as one printable line."""
    return Text(printable(text), style)


def plain_table(
    texts: Sequence[str] = (), numbers: Sequence[str] = (), is_rigid: bool = False, **options: Any
) -> Table:
    """Return a table without lines, with columns of text and, right-aligned, of numbers.

    Long text is folded; the cells of an `is_rigid` table are never wrapped.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", **options)
    for heading in texts:
        table.add_column(heading, overflow="ellipsis" if is_rigid else "fold", no_wrap=is_rigid)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=is_rigid)
    return table
