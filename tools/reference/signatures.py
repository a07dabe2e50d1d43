"""Signatures as people write them: the same text on every version of Python.

Annotations are those of the source; a default that is an enum member is named by its class, one whose repr has an
address in it by its type.
"""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

_WIDTH = 100
_OWN = ("self", "cls")
_STARS = {inspect.Parameter.VAR_POSITIONAL.name: "*", inspect.Parameter.VAR_KEYWORD.name: "**"}


def signature_of(thing: Any, is_method: bool = False) -> str:
    """The parameters and the result of a function, or of building a class; one parameter a line where they are many.

    >>> def scaled(x: int, by: float = 2.0) -> float: ...
    >>> signature_of(scaled)
    '(x: int, by: float = 2.0) -> float'
    """
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):  # built in C, without one
        return "(...)"
    parameters = list(signature.parameters.values())
    if is_method and parameters and parameters[0].name in _OWN:
        parameters = parameters[1:]
    parts = _parts(parameters)
    result = signature.return_annotation
    has_result = result is not inspect.Signature.empty and not inspect.isclass(thing)
    ending = f" -> {_annotation(result)}" if has_result else ""
    line = f"({', '.join(parts)}){ending}"
    if len(line) <= _WIDTH:
        return line
    return "(\n" + "".join(f"    {part},\n" for part in parts) + f"){ending}"


def _parts(parameters: list[inspect.Parameter]) -> list[str]:
    parts = []
    has_star = False
    for parameter in parameters:
        has_star = has_star or parameter.kind is inspect.Parameter.VAR_POSITIONAL
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not has_star:
            parts.append("*")
            has_star = True
        parts.append(_parameter(parameter))
    return parts


def _parameter(parameter: inspect.Parameter) -> str:
    text = _STARS.get(parameter.kind.name, "") + parameter.name
    has_annotation = parameter.annotation is not inspect.Parameter.empty
    if has_annotation:
        text += f": {_annotation(parameter.annotation)}"
    if parameter.default is inspect.Parameter.empty:
        return text
    return f"{text} = {_default(parameter.default)}" if has_annotation else f"{text}={_default(parameter.default)}"


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation.strip("'\"")
    return str(annotation.__name__ if inspect.isclass(annotation) else annotation)


def _default(value: Any) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isclass(value) or inspect.isfunction(value):
        return str(value.__name__)
    text = repr(value)
    return "..." if " at 0x" in text or text.startswith("<") else text
