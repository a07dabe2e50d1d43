"""A docstring as Markdown: paragraphs stay paragraphs, examples and drawings stay as they are.

    an example of Python         fenced
    indented lines, and those    fenced as text
    aligned by runs of spaces
    other paragraphs             prose

Something public without a docstring is an error: the reference would have nothing to say of it.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from typing import Any

from quark.errors import InvalidValueError
from tools.reference.markdown import fenced, plain

_ALIGNED = re.compile(r"\S {2,}\S")


def docstring(thing: Any, name: str) -> str:
    """The cleaned docstring of a class, function or property; one that Python or `dataclass` made up counts as none."""
    own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    is_made_up = inspect.isclass(thing) and own is not None and own.startswith(f"{thing.__name__}(")
    if not own or is_made_up or own == "An enumeration.":
        raise InvalidValueError(f"'{name}' has no docstring: write one, the API reference is made of them")
    return inspect.cleandoc(own)


def to_markdown(text: str) -> str:
    """The same text in Markdown.

    >>> to_markdown("What `x * y` is.\\n\\n    a  drawing")
    'What `x * y` is.\\n\\n```text\\na  drawing\\n```\\n'
    """
    return "\n".join(_paragraph(part) for part in re.split(r"\n\s*\n", text.strip("\n")))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if lines[0].lstrip().startswith(">>> "):
        return fenced(inspect.cleandoc(text), "pycon")
    if lines[0].startswith("    ") or all(_ALIGNED.search(line) for line in lines):
        return fenced(textwrap.dedent(text))
    return plain(text) + "\n"
