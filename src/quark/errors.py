"""The errors that quark raises.

Every message says what was given, what is possible, and what to do. Each class is also the built-in exception that a
Python programmer would catch for the same mistake, so both `except ValueError` and `except QuarkError` work.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from dataclasses import FrozenInstanceError, fields
from typing import Any, TypeVar

from quark.text import one_line, printable

_MOST_CHARACTERS, _LAST_CHARACTERS = 3000, 1000  # characters of a message, and of its end after the omitted part


class QuarkError(Exception):
    """The base class of all errors that quark raises on purpose.

    The message is one printable line, whatever names it contains. Line breaks in the message of its cause are joined;
    any other line break is shown as an escape. The middle of a very long message is left out. `args` keep the exact
    text.
    """

    def __str__(self) -> str:
        text = super().__str__()
        cause = "" if self.__cause__ is None else str(self.__cause__)
        text = text.replace(cause, one_line(cause)) if "\n" in cause else text
        if len(text) > _MOST_CHARACTERS:
            text = f"{text[: _MOST_CHARACTERS - _LAST_CHARACTERS]} [...] {text[-_LAST_CHARACTERS:]}"
        return printable(text)


class InvalidValueError(QuarkError, ValueError):
    """An argument has the right type but an invalid value."""


class UnknownNameError(InvalidValueError):
    """An unknown name; the message suggests similar ones."""


class UnsupportedTypeError(QuarkError, TypeError):
    """An argument has an unsupported type."""


class UnsupportedOptionError(QuarkError, NotImplementedError):
    """An option that exists but is not implemented in this version; the message says why and what to do."""


class OutputError(QuarkError, OSError):
    """A file or folder cannot be written: a full disk, a limit, missing permissions. The message names it."""


class MissingDependencyError(QuarkError, ImportError):
    """A required optional package is not installed; the message names the choices."""


class ModelError(QuarkError, ValueError):
    """An ONNX model cannot be processed; the message names the node or tensor."""


_MOST_LISTED, _FEW_LISTED = 40, 8


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """Return the error for an unknown name: similar names first, then all names if they are few, else the first ones.

    >>> str(unknown_name("scale rule", "flor", ["floor", "ceil"]))
    "no scale rule 'flor'. Did you mean floor? Known: floor, ceil."
    >>> str(unknown_name("format", "mxfp4", ["mx4", "mxfp4_e2m1"]))
    "no format 'mxfp4'. Did you mean mxfp4_e2m1? Known: mx4, mxfp4_e2m1."
    >>> str(unknown_name("number", "none", map(str, range(99))))
    "no number 'none'. Known are 99, such as 0, 1, 2, 3, 4, 5, 6, 7."
    """
    names = list(known)
    wanted = str(name).lower()
    longer = [
        other for other in names if wanted and (other.lower().startswith(wanted) or wanted in other.lower().split("_"))
    ]
    by_lower = {other.lower(): other for other in names}
    nearest = longer[:3] or [by_lower[m] for m in difflib.get_close_matches(wanted, by_lower, n=3, cutoff=0.65)]
    hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
    listing = f" Known: {', '.join(names)}." if len(names) <= _MOST_LISTED else ""
    listing = listing if names else " There are none."
    if len(names) > _MOST_LISTED and not nearest:
        listing = f" Known are {len(names)}, such as {', '.join(names[:_FEW_LISTED])}."
    return UnknownNameError(f"no {kind} {name!r}.{hint}{listing}")


_Class = TypeVar("_Class")


def refuse_unknown_fields(cls: type[_Class]) -> type[_Class]:
    """Class decorator for dataclasses that people edit: assigning to a misspelt field raises an error.

    Place it above `@dataclass`. Subclasses inherit the check, except frozen dataclasses, which need the decorator
    again. Properties with a setter count as fields. Raises UnknownNameError with the nearest fields, and
    FrozenInstanceError where the class is frozen.

    >>> from dataclasses import dataclass
    >>> @refuse_unknown_fields
    ... @dataclass
    ... class Options:
    ...     steps: int = 1
    >>> Options().step = 2
    Traceback (most recent call last):
    quark.errors.UnknownNameError: no field of Options 'step'. Did you mean steps? Known: steps.
    """
    made: Any = cls
    assign, is_frozen = made.__setattr__, made.__dataclass_params__.frozen

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807 - becomes the method of that name
        kind: Any = type(self)
        if name not in _assignable(kind):
            raise unknown_name(f"field of {kind.__name__}", name, _assignable(kind))
        if is_frozen:
            raise FrozenInstanceError(
                f"{kind.__name__}.{name} cannot be assigned: make a changed copy, dataclasses.replace(..., {name}=...)"
            )
        assign(self, name, value)

    made.__setattr__ = __setattr__
    return cls


@functools.cache
def _assignable(cls: Any) -> dict[str, None]:
    """Fields and properties with a setter, in order."""
    properties = [name for name in dir(cls) if getattr(getattr(cls, name), "fset", None) is not None]
    return dict.fromkeys([*(field.name for field in fields(cls)), *properties])
