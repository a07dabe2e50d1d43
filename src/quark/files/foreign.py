"""The reader of JSON and YAML from untrusted sources.

    read_json, read_yaml      the content of a regular file of limited size
    parse_json, parse_yaml    the content of a text, such as a model's metadata or a command line
    Fields                    typed access to a mapping: an error names the document and the field
    open_regular              a regular file, opened for reading
    check_folder              a limit on the number of files in a folder, before it is listed

Content is limited in every way before it is returned: bytes, entries, levels of nesting, digits of a number, and the
length of a text. YAML aliases count each time they are expanded. A key is there once. All numbers fit a float. Any
problem raises an InvalidValueError, or the `error` that the caller passes, that names the document and the field.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from quark.errors import InvalidValueError, QuarkError

Error = type[QuarkError]

MOST_DIGITS = 300  # digits of a number, so that it fits a float
MOST_NAME = 255  # characters of a file's name
MOST_DIMENSIONS, MOST_SIZE = 64, 1 << 48  # of an array, and of each dimension
_TAG = "tag:yaml.org,2002:"
_FLAGS = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


@dataclass(frozen=True)
class Limits:
    """Limits of a document: bytes of its file, entries of all lists and mappings together, levels of nesting, and
    characters of a text. Numbers must be finite; quark writes infinities and NaN as text."""

    bytes: int
    entries: int
    levels: int = 40
    text: int = 1 << 20


REPORT = Limits(256 << 20, 1 << 24, text=1 << 28)  # a plan lists the scales of every weight
SETTINGS = Limits(4 << 20, 200_000, text=1 << 16)  # documents that people write
RECORD = Limits(64 << 20, 1 << 21)  # documents that quark writes about one run or one file

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 60
_SHORT.maxlevel = 3


def short(value: Any) -> str:
    """A value for a message, shortened: the problem with a document may be its length."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---------------------------------------------------------------- files
def open_regular(path: str | os.PathLike[str], label: str, error: Error = InvalidValueError) -> IO[bytes]:
    """Open a file for reading if it is a regular one. A pipe would block, and a device may never end."""
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISREG(kind):  # devices are not even opened, which may have effects
            descriptor = os.open(path, _FLAGS)
            kind = os.fstat(descriptor).st_mode  # checked on the open file, in case it was replaced meanwhile
            if stat.S_ISREG(kind):
                return os.fdopen(descriptor, "rb")
            os.close(descriptor)
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the name
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{label} cannot be read: {reason}") from problem
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    what = next((name for is_kind, name in kinds if is_kind(kind)), "a device")
    raise error(f"{label} cannot be read: it is {what}; expected a regular file")


def read_bytes(
    path: str | os.PathLike[str], label: str, most: int = REPORT.bytes, error: Error = InvalidValueError
) -> bytes:
    """Read a regular file of at most that many bytes."""
    with open_regular(path, label, error) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            content = b"" if size > most else file.read(most + 1)
        except OSError as problem:
            raise error(f"{label} cannot be read: {problem.strerror or problem}") from problem
    if size > most or len(content) > most:
        raise error(f"{label} has {max(size, len(content)):,} bytes: expected at most {most:,}")
    return content


def read_text(
    path: str | os.PathLike[str], label: str, most: int = REPORT.bytes, error: Error = InvalidValueError
) -> str:
    """Read a regular file as UTF-8."""
    content = read_bytes(path, label, most, error)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{label} cannot be read: it is not text in UTF-8: {problem}") from problem


def read_json(
    path: str | os.PathLike[str], label: str, limits: Limits = RECORD, error: Error = InvalidValueError
) -> Any:
    """Return the content of a JSON file."""
    return parse_json(read_text(path, label, limits.bytes, error), label, limits, error)


def read_yaml(
    path: str | os.PathLike[str], label: str, limits: Limits = SETTINGS, error: Error = InvalidValueError
) -> Any:
    """Return the content of a YAML file."""
    return parse_yaml(read_text(path, label, limits.bytes, error), label, limits, error)


# ---------------------------------------------------------------- text
@dataclass(frozen=True)
class _Refused:
    """Stands for a refused value until its field is known."""

    reason: str


def parse_json(text: str, label: str, limits: Limits = RECORD, error: Error = InvalidValueError) -> Any:
    """Return the content of a JSON text.

    >>> parse_json('{"a": [1, 2.5]}', "card")
    {'a': [1, 2.5]}
    >>> parse_json('{"a": {"b": [1e999]}}', "card")
    Traceback (most recent call last):
    ...
    quark.errors.InvalidValueError: card: field 'a.b[0]' is inf: expected a finite number
    """
    if len(text) > limits.bytes:
        raise error(f"{label} has {len(text):,} characters: expected at most {limits.bytes:,}")
    if text.count(",") + text.count("[") + text.count("{") > limits.entries:  # before memory is allocated for them
        raise error(f"{label} has more than {limits.entries:,} entries")
    try:
        content = json.loads(
            text,
            object_pairs_hook=_mapping,
            parse_int=lambda number: int(number) if len(number) <= MOST_DIGITS else _long_number(number),
            parse_float=lambda number: float(number) if len(number) <= MOST_DIGITS else _long_number(number),
        )
    except RecursionError as problem:
        raise error(f"{label} is nested more than {limits.levels} levels deep") from problem
    except ValueError as problem:
        raise error(f"{label} is not valid JSON: {problem}") from problem
    return _checked(content, label, limits, error)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A mapping in which keys that are there twice are refused: one of their values would be ignored."""
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        content |= {key: _Refused("is there twice: remove one of them") for key, count in counts.items() if count > 1}
    return content


def _long_number(text: str) -> _Refused:
    return _Refused(f"is a number of {len(text):,} digits: expected at most {MOST_DIGITS}")


def parse_yaml(text: str, label: str, limits: Limits = SETTINGS, error: Error = InvalidValueError) -> Any:
    """Return the content of a YAML text of one document. Keys are text, as written. Dates and tags other than those of
    JSON's types are refused.

    >>> parse_yaml("{a: &x [1, 2], b: *x}", "config")
    {'a': [1, 2], 'b': [1, 2]}
    >>> parse_yaml("when: 2020-01-01", "config")
    Traceback (most recent call last):
    ...
    quark.errors.InvalidValueError: config: field 'when' is a date: write it in quotes if text is meant
    """
    import yaml

    if len(text) > limits.bytes:
        raise error(f"{label} has {len(text):,} characters: expected at most {limits.bytes:,}")
    try:
        content = _YamlBuilder(text, label, limits, error).document()
    except (yaml.YAMLError, RecursionError) as problem:
        raise error(f"{label} is not valid YAML: {' '.join(str(problem).split())}") from problem
    return _checked(content, label, limits, error)


@dataclass
class _Open:
    """A list or mapping that is being read. `before` counts the entries before it."""

    value: list[Any] | dict[str, Any]
    anchor: str | None
    before: int
    key: str | None = None
    is_merging: bool = False  # the next value belongs to the key `<<`
    merged: dict[str, Any] = field(default_factory=dict)


class _YamlBuilder:
    """Builds the content from the events of PyYAML's parser, whose own constructor has no limits."""

    def __init__(self, text: str, label: str, limits: Limits, error: Error) -> None:
        import yaml

        self._yaml = yaml
        self._loader: Any = yaml.SafeLoader(text)
        self._label, self._limits, self._error = label, limits, error
        self._open: list[_Open] = []
        self._anchors: dict[str, tuple[Any, int]] = {}  # value and how many entries it is
        self._count = 0
        self._line = 0
        self._root: Any = None

    def document(self) -> Any:
        events = self._yaml.events
        has_document = False
        while True:
            event = self._loader.get_event()
            self._line = event.start_mark.line + 1
            if isinstance(event, events.StreamEndEvent):
                return self._root
            if isinstance(event, events.DocumentStartEvent):
                if has_document:
                    self._refuse("a second document begins: expected one")
                has_document = True
            elif isinstance(event, events.ScalarEvent):
                self._scalar(event)
            elif isinstance(event, events.AliasEvent):
                if event.anchor not in self._anchors:
                    self._refuse(f"no anchor '{short(event.anchor)[1:-1]}' ends before this alias")
                value, size = self._anchors[event.anchor]
                self._count_entries(size)
                self._put(value, value if isinstance(value, str) else None)
            elif isinstance(event, events.CollectionStartEvent):
                self._begin(event)
            elif isinstance(event, events.CollectionEndEvent):
                self._end()

    def _begin(self, event: Any) -> None:
        is_list = isinstance(event, self._yaml.events.SequenceStartEvent)
        if event.tag not in (None, "!", _TAG + ("seq" if is_list else "map")):
            self._refuse(f"the tag {short(event.tag)} is not read")
        if len(self._open) >= self._limits.levels:
            self._refuse(f"it is nested more than {self._limits.levels} levels deep")
        before = self._count
        self._count_entries(1)
        self._open.append(_Open([] if is_list else {}, event.anchor, before))

    def _end(self) -> None:
        ended = self._open.pop()
        if ended.merged and isinstance(ended.value, dict):
            ended.value = {**ended.merged, **ended.value}
        if ended.anchor is not None:
            self._anchors[ended.anchor] = ended.value, self._count - ended.before
        self._put(ended.value, None)

    def _scalar(self, event: Any) -> None:
        self._count_entries(1)
        tag = event.tag
        if tag is None or tag == "!":
            tag = self._loader.resolve(self._yaml.ScalarNode, event.value, event.implicit)
        is_key = bool(self._open) and isinstance(self._open[-1].value, dict) and self._open[-1].key is None
        if is_key and tag == f"{_TAG}merge":
            self._open[-1].is_merging = True
            self._open[-1].key = event.value
            return
        value = event.value if is_key else self._converted(tag, event.value)
        if event.anchor is not None:
            self._anchors[event.anchor] = value, 1
        self._put(value, event.value)

    def _converted(self, tag: str, text: str) -> Any:
        kind = tag.removeprefix(_TAG)
        if kind in ("str", "value", "merge"):
            return text
        if kind == "null":
            return None
        if kind == "timestamp":
            return _Refused("is a date: write it in quotes if text is meant")
        if kind not in ("bool", "int", "float"):
            return _Refused(f"has the tag {short(tag)}, which is not read")
        if len(text) > MOST_DIGITS:
            return _long_number(text)
        node = self._yaml.ScalarNode(tag, text)
        try:
            value = getattr(self._loader, f"construct_yaml_{kind}")(node)
        except (ValueError, LookupError, OverflowError):
            return _Refused(f"is {short(text)}: expected a value of type {kind}")
        return _Refused("is a number too large") if kind == "int" and abs(value) > 10**MOST_DIGITS else value

    def _put(self, value: Any, text: str | None) -> None:
        """Add a value to its collection; `text` is how it is written, None for what cannot be a key."""
        if not self._open:
            self._root = value
            return
        place = self._open[-1]
        if isinstance(place.value, list):
            place.value.append(value)
        elif place.key is None:
            if text is None:
                self._refuse("a key is a list or a mapping: expected text")
            place.key = text
        elif place.is_merging:
            sources = value if isinstance(value, list) else [value]
            if not all(isinstance(source, dict) for source in sources):
                self._refuse("'<<' takes a mapping, or a list of mappings")
            for source in reversed(sources):  # the first one counts most
                place.merged.update(source)
            place.key, place.is_merging = None, False
        elif place.key in place.value:
            self._refuse(f"key {short(place.key)} is there twice: remove one of them")
        else:
            place.value[place.key] = value
            place.key = None

    def _count_entries(self, count: int) -> None:
        self._count += count
        if self._count > self._limits.entries:
            self._refuse(f"it has more than {self._limits.entries:,} entries, aliases expanded")

    def _refuse(self, reason: str) -> NoReturn:
        raise self._error(f"{self._label}, line {self._line}: {reason}")


def _checked(content: Any, label: str, limits: Limits, error: Error) -> Any:
    """The content, after a check of every value in it; without recursion, because it may be nested deeply."""
    # each collection with its path: that of the collection around it, and its key there
    stack: list[tuple[Any, tuple[Any, Any] | None, int]] = [([content], None, 0)]
    while stack:
        collection, link, level = stack.pop()
        is_mapping = isinstance(collection, dict)
        items: Iterable[tuple[Any, Any]] = collection.items() if is_mapping else enumerate(collection)
        for key, value in items:
            kind = type(value)
            if kind is str:
                if problem := _problem_of_text(value, limits):
                    raise error(f"{label}: {_place(link, key)} {problem}")
            elif kind is float:
                if not math.isfinite(value):
                    raise error(f"{label}: {_place(link, key)} is {value}: expected a finite number")
            elif kind is dict or kind is list:
                if level >= limits.levels:
                    raise error(f"{label} is nested more than {limits.levels} levels deep")
                stack.append((value, (link, key), level + 1))
            elif kind is _Refused:
                raise error(f"{label}: {_place(link, key)} {value.reason}")
            if is_mapping and (problem := _problem_of_text(key, limits)):
                raise error(f"{label}: {_place(link, key)} has a name that {problem}")
    return content


def _place(link: tuple[Any, Any] | None, key: Any) -> str:
    """A value in an error message: its field, or 'it' for the whole content."""
    keys = [key]
    while link is not None:
        link, key = link
        keys.append(key)
    path = key_path(keys[-2::-1])  # without the list around the whole content
    return f"field '{path}'" if path else "it"


def _problem_of_text(text: str, limits: Limits) -> str:
    if len(text) > limits.text:
        return f"has {len(text):,} characters: expected at most {limits.text:,}"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "holds half of a surrogate pair: expected text that is valid Unicode"
    return ""


def key_path(keys: Iterable[Any]) -> str:
    """A field by its keys: `tensors[3].choice`."""
    parts = [f"[{key}]" if isinstance(key, int) else f".{short(key)[1:-1]}" for key in keys]
    return "".join(parts).removeprefix(".")


# ---------------------------------------------------------------- fields
class Fields:
    """A mapping of a document, read field by field; errors name the field.

    `label` names the document, and `path` the place of the mapping in it.

    >>> fields = Fields({"name": "x", "data": {"count": -1}}, "card 'a.json'")
    >>> fields.text("name")
    'x'
    >>> fields.mapping("data").integer("count", least=1)
    Traceback (most recent call last):
    ...
    quark.errors.InvalidValueError: card 'a.json': field 'data.count' is -1: expected an integer of at least 1
    """

    def __init__(self, content: Any, label: str, path: str = "", error: Error = InvalidValueError) -> None:
        self._label, self._path, self._error = label, path, error
        if not isinstance(content, Mapping):
            where = f"field '{path}' is {short(content)}" if path else f"it is {short(content)}"
            raise error(f"{label}: {where}: expected a mapping of fields")
        self.content: Mapping[str, Any] = content

    def __contains__(self, name: str) -> bool:
        return name in self.content

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def has(self, name: str) -> bool:
        """True if the field exists and is not null."""
        return self.content.get(name) is not None

    def value(self, name: str) -> Any:
        """Return a required field of any type."""
        if name not in self.content:
            raise self._error(f"{self._label}: field '{self._where(name)}' is missing")
        return self.content[name]

    def text(self, name: str, choices: Iterable[str] = (), most: int = 1 << 20) -> str:
        value, known = self.value(name), list(choices)
        if not isinstance(value, str) or (known and value not in known):
            self.refuse(name, f"one of {', '.join(known)}" if known else "text")
        if len(value) > most:
            raise self._error(
                f"{self._label}: field '{self._where(name)}' has {len(value):,} characters: expected at most {most:,}"
            )
        return value

    def file_name(self, name: str) -> str:
        """Return a name without folders, which is safe as part of a path."""
        value = self.text(name)
        if any(character in value for character in "/\\\0") or value in (".", "..") or len(value) > MOST_NAME:
            self.refuse(name, f"a name without folders, of at most {MOST_NAME} characters")
        return value

    def integer(self, name: str, least: int | None = 0, most: int = (1 << 63) - 1) -> int:
        value = self.value(name)
        lowest = -(1 << 63) if least is None else least
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= most:
            bounds = "" if least is None else f" of at least {least}" if most >= 1 << 62 else f" from {least} to {most}"
            self.refuse(name, f"an integer{bounds}")
        return value

    def number(self, name: str, least: float = -math.inf, *, is_finite: bool = True) -> float:
        """Return a number, which may be an integer. Infinities and NaN are text in JSON, accepted if not
        `is_finite`."""
        value = self.value(name)
        if isinstance(value, str) and value in ("inf", "-inf", "nan") and not is_finite:
            value = float(value)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or value < least or (is_finite and not math.isfinite(value)):
            self.refuse(name, "a number" if least == -math.inf else f"a number of at least {least:g}")
        return value  # type: ignore[no-any-return]

    def boolean(self, name: str) -> bool:
        value = self.value(name)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def array(self, name: str, length: int | None = None) -> list[Any]:
        value = self.value(name)
        if not isinstance(value, list) or length not in (None, len(value)):
            self.refuse(name, "a list" if length is None else f"a list of {length}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self.array(name)
        if not all(isinstance(item, str) for item in value):
            self.refuse(name, "a list of texts")
        return tuple(value)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the sizes of an array's dimensions."""
        value = self.array(name)
        if len(value) > MOST_DIMENSIONS or not all(type(size) is int and 0 <= size < MOST_SIZE for size in value):
            self.refuse(name, f"a list of at most {MOST_DIMENSIONS} sizes, which are integers from 0 on")
        return tuple(value)

    def mapping(self, name: str) -> Fields:
        return Fields(self.value(name), self._label, self._where(name), self._error)

    def mappings(self, name: str) -> list[Fields]:
        """Return the mappings of a list."""
        where = self._where(name)
        return [Fields(item, self._label, f"{where}[{i}]", self._error) for i, item in enumerate(self.array(name))]

    def refuse_others(self, known: Iterable[str]) -> None:
        """Raise an error if there are fields with other names."""
        names = set(known)
        if strange := [name for name in self.content if name not in names]:
            where = f" of '{self._path}'" if self._path else ""
            raise self._error(
                f"{self._label}: field {short(strange[0])}{where} is not known: expected {', '.join(sorted(names))}"
            )

    def refuse(self, name: str, expected: str) -> NoReturn:
        """Raise the error for an unexpected field."""
        raise self._error(
            f"{self._label}: field '{self._where(name)}' is {short(self.content.get(name))}: expected {expected}"
        )

    def _where(self, name: str) -> str:
        last = short(name)[1:-1]
        return f"{self._path}.{last}" if self._path else last


def check_folder(folder: Path, label: str, most: int, error: Error = InvalidValueError) -> None:
    """Raise an error if more than that many files and folders lie in a folder and below it. Links are not followed."""
    count, waiting = 0, [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    count += 1
                    if count > most:
                        raise error(f"{label} holds more than {most:,} files and folders")
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except PermissionError:  # noqa: PERF203
            continue  # it cannot be listed later either
        except OSError as problem:
            raise error(f"{label} cannot be read: {problem.strerror or problem}") from problem
