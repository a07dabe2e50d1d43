"""JSON with one space of indentation, the form of plans and reports.

Python's encoder is written in C, but only without indentation; a plan has hundreds of thousands of numbers. Here every
list or object without inner ones is encoded at once, with line breaks and indentation as its separator.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

_NESTING = (dict, list, tuple)


def indented_json(content: Any) -> str:
    """Return the text that `json.dumps(content, indent=1, allow_nan=False)` returns.

    >>> print(indented_json({"scale": [0.5, 2.0], "axis": None}))
    {
     "scale": [
      0.5,
      2.0
     ],
     "axis": null
    }
    """
    pieces: list[str] = []
    _add(pieces, content, 0)
    return "".join(pieces)


def _add(pieces: list[str], content: Any, depth: int) -> None:
    if not isinstance(content, _NESTING) or not content:
        pieces.append(_encoder(0)(content))
        return
    start, end = "\n" + " " * (depth + 1), "\n" + " " * depth
    values = content.values() if isinstance(content, dict) else content
    if not any(isinstance(value, _NESTING) for value in values):
        text = _encoder(depth + 1)(content)
        pieces.append(f"{text[0]}{start}{text[1:-1]}{end}{text[-1]}")
    elif isinstance(content, dict):
        separator = "{" + start
        for key, value in content.items():
            # keys that are not text become text in an object
            name = f"{_encoder(0)(key)}: " if isinstance(key, str) else _encoder(0)({key: None})[1 : -len("null}")]
            pieces.append(separator + name)
            _add(pieces, value, depth + 1)
            separator = "," + start
        pieces.append(end + "}")
    else:
        separator = "[" + start
        for value in content:
            pieces.append(separator)
            _add(pieces, value, depth + 1)
            separator = "," + start
        pieces.append(end + "]")


@cache
def _encoder(depth: int) -> Callable[[Any], str]:
    return json.JSONEncoder(allow_nan=False, separators=(",\n" + " " * depth, ": ")).encode
