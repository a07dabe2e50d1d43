"""Tables and lines by rich, with names as they are.

A name can hold what rich would read as markup, and what a terminal would obey. Consoles made here read no markup, and
show control characters as escapes; `cell` is the only way to give text a style.
"""

from __future__ import annotations

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
        """Print one line, which is not wrapped: commands and paths in it can be copied."""
        self.print(cell(text, style), soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:
        """Text for a string, such as a cell of a table; line breaks are kept."""
        shown = "\n".join(map(printable, text.split("\n")))
        return super().render_str(shown, **{**options, "markup": False, "emoji": False})


def cell(text: str, style: str = "") -> Text:
    """One printable line."""
    return Text(printable(text), style)


def plain_table(**options: Any) -> Table:
    """A table without lines."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", **options)
