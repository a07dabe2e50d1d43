"""What a card may hold, field by field: each function gives the value back, or says what is wrong with it.

Cards come from anybody. Messages hold no more than the beginning of what they are about.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from quark.errors import InvalidValueError

MOST_LEVELS = 40  # of nesting; those of ours have some ten
MOST_BYTES = 256 << 20  # of MODEL.json; beyond that it is something else
MOST_NAME = 255  # characters that a file may be called by
MOST_TEXT = 1 << 20  # characters: more than any command has
_SHA256 = re.compile(r"[0-9a-f]{64}")


def short(value: Any) -> str:
    """For messages: what is wrong with a card may be its length."""
    content = str(value)
    return content if len(content) <= 60 else f"{content[:57]}..."


def exactly(content: Mapping[str, Any], known: set[str], what: str) -> None:
    if set(content) != known:
        raise InvalidValueError(f"card: {what} has fields {short(sorted(content))}: expected {sorted(known)}")


def mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValueError(f"card: {what} is {short(value)!r}: expected a mapping")
    return dict(value)


def shallow(content: dict[str, Any], what: str) -> dict[str, Any]:
    """Of a reasonable depth: what reads it later may go into it by recursion."""
    if depth(content) > MOST_LEVELS:
        raise InvalidValueError(f"card: {what} is nested more than {MOST_LEVELS} levels deep")
    return content


def depth(content: Any) -> int:
    """How deep JSON is nested, 1 for a number; beyond MOST_LEVELS it is not counted further."""
    count, level = 0, [content]
    while level and count <= MOST_LEVELS:
        count += 1
        inner = [each for each in level if isinstance(each, (dict, list))]
        level = [value for each in inner for value in (each.values() if isinstance(each, dict) else each)]
    return count


def list_of(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidValueError(f"card: {what} is {short(value)!r}: expected a list")
    return value


def texts(value: Any, what: str) -> dict[str, str]:
    return {name: text(each, f"{what}.{name}") for name, each in mapping(value, what).items()}


def numbers(value: Any, what: str) -> dict[str, Any]:
    """A number, some or None under each name."""
    for name, each in mapping(value, what).items():
        for one in each if isinstance(each, list) else [each]:
            if isinstance(one, bool) or not (one is None or isinstance(one, (int, float))):
                raise InvalidValueError(f"card: {what}.{name} is {short(each)!r}: expected numbers")
    return dict(value)


def text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidValueError(f"card: {what} is {short(value)!r}: expected text")
    if len(value) > MOST_TEXT:
        raise InvalidValueError(f"card: {what} has {len(value)} characters: expected at most {MOST_TEXT}")
    return value


def file_name(value: Any, what: str) -> str:
    name = text(value, what)
    if any(each in name for each in "/\\\0") or name in (".", ".."):
        raise InvalidValueError(f"card: {what} {short(name)!r}: expected a name without folders")
    if len(name) > MOST_NAME:
        raise InvalidValueError(f"card: {what} {short(name)!r}: expected at most {MOST_NAME} characters")
    return name


def sha256(value: Any, what: str) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise InvalidValueError(f"card: {what} is {short(value)!r}: expected 64 hexadecimal digits")
    return value


def number(value: Any, what: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidValueError(f"card: {what} is {short(value)!r}: expected a number of at least {least}")
    return value


def relative_paths(content: Any) -> dict[str, str]:
    """Under the names source and data."""
    paths = texts(content, "paths")
    for name, path in paths.items():
        is_plain = not PurePosixPath(path).is_absolute() and not PureWindowsPath(path).anchor and "\0" not in path
        is_long = any(len(part) > MOST_NAME for part in path.split("/"))
        if name not in ("source", "data") or not is_plain or is_long:
            what = f"paths.{short(name)} {short(path)!r}"
            raise InvalidValueError(f"card: {what}: expected a relative path of 'source' or 'data'")
    return paths
