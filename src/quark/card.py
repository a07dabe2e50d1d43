"""The reproducibility card: everything that is needed to make a quantized file again.

It lies in two places:

    in the model     the metadata `quark.card`: what the bytes of the file follow from, and nothing else. It names no
                     file, folder or processor, so that the same making gives the same bytes wherever it happens
    beside it        MODEL.json, under `card`: the same, and what belongs to this one run: names, relative paths, the
                     platform, the command, and the hash of the result, which no file can hold of itself

A card is read strictly: it may come from anybody. Names hold no folders, paths are relative, hashes are hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from quark.account import FileFacts
from quark.errors import InvalidValueError
from quark.formats.native import instruction_set

CARD_VERSION = 1
CARD_KEY = "quark.card"  # of the metadata of the model, and the last part of it in MODEL.json
MOST_CHARACTERS = 32 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OF_ONE_RUN = ("platform", "command", "paths", "result")


class DataKind(str, Enum):
    """What calibration data came as. `object`: something in Python, such as a reader, which no card can hold."""

    FOLDER = "folder"
    FILE = "file"
    OBJECT = "object"
    RANDOM = "random"
    UNUSED = "unused"  # the result does not hang on samples


@dataclass(frozen=True)
class DataFacts:
    """The data as it was asked for, and as it was fed. `count` None: all there was. `preprocessing` has the fields of a
    Preprocessing. `sha256` is `samples_digest` of the samples that were calibrated on, then of those held out; empty
    where none were used. `seed` is that of random numbers."""

    kind: DataKind
    name: str = ""
    count: int | None = None
    batch_size: int = 1
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 0
    held_out: int = 0
    sha256: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Card:
    """How a file was made. `functions` are options that held Python functions: with any, it cannot be made again from
    the card. `packing` is the profile of packed weights, or empty; with the four fields behind it, it is not in the
    model's card: packing keeps that as it is, and says itself what it did."""

    source: FileFacts
    config_name: str
    config: Mapping[str, Any]
    data: DataFacts
    versions: Mapping[str, str]
    plan_sha256: str
    seeds: Mapping[str, int] = field(default_factory=dict)
    functions: tuple[str, ...] = ()
    packing: str = ""
    platform: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    paths: Mapping[str, str] = field(default_factory=dict)  # from the folder of the card: source, data
    result: FileFacts | None = None

    def inside(self) -> Card:
        """The part that the model holds."""
        bare = replace(self, packing="", platform={}, command="", paths={}, result=None)
        return replace(bare, source=replace(self.source, name=""), data=replace(self.data, name=""))

    def to_dict(self) -> dict[str, Any]:
        content = {**asdict(self), "version": CARD_VERSION, "functions": list(self.functions)}
        content["data"]["kind"] = self.data.kind.value
        return {name: value for name, value in content.items() if value or name not in _OF_ONE_RUN}

    def to_json(self) -> str:
        """One line, the same for equal cards; `from_json` gives an equal card back."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Card:
        if len(text) > MOST_CHARACTERS:
            raise InvalidValueError(f"card of {len(text)} characters: expected at most {MOST_CHARACTERS}")
        try:
            return Card.from_dict(json.loads(text))
        except (json.JSONDecodeError, RecursionError) as error:
            raise InvalidValueError(f"not a card: {type(error).__name__}: {error}") from error

    @staticmethod
    def from_dict(content: Any) -> Card:
        """The card, every field of which is checked."""
        return _card(_mapping(content, "card"))


def samples_digest(samples: Iterable[Mapping[str, Any]], held_out: Iterable[Mapping[str, Any]] = ()) -> str:
    """SHA-256 over names, types, shapes and bytes of arrays, in the order in which they are fed.

    >>> import numpy as np
    >>> one, other = {"x": np.zeros(4, np.float32)}, {"x": np.zeros((2, 2), np.float32)}
    >>> samples_digest([one]) == samples_digest([other]), samples_digest([one]) == samples_digest([], [one])
    (False, False)
    """
    state = hashlib.sha256()
    for part, items in (("samples", samples), ("held out", held_out)):
        state.update(f"{part}\n".encode())
        for sample in items:
            for name, array in sample.items():
                state.update(f"{len(name)}:{name}:{array.dtype}:{array.shape};".encode())
                state.update(array.tobytes())
            state.update(b"\n")
    return state.hexdigest()


def platform_facts() -> dict[str, str]:
    """What may change the last bits of a sum: the processor, the code chosen for it, and how many threads share it."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "instruction_set": instruction_set() or "none",
        "processors": str(os.cpu_count() or 0),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
    }


def relative_path(path: Path, folder: Path) -> str | None:
    """The way from the folder to the path, with slashes; None where there is none, as between drives."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        return None


def differences(first: Card, second: Card) -> list[str]:
    """What two cards say differently, as phrases: `versions.numpy: 1.26.4, now 2.0.0`. Only what both models hold, and
    the platform where both know it."""
    found: list[str] = []
    one, two = first.inside().to_dict(), second.inside().to_dict()
    if first.platform and second.platform:
        one["platform"], two["platform"] = dict(first.platform), dict(second.platform)
    _collect(one, two, "", found)
    return found


def _collect(one: Any, two: Any, where: str, found: list[str]) -> None:
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        for key in sorted({*one, *two}, key=str):
            _collect(one.get(key), two.get(key), f"{where}.{key}" if where else str(key), found)
    elif one != two:
        found.append(f"{where}: {_short(one)}, now {_short(two)}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _card(content: dict[str, Any]) -> Card:
    version = content.pop("version", None)
    if version != CARD_VERSION:
        raise InvalidValueError(f"card of version {version!r}: this quark reads version {CARD_VERSION}; update it")
    known = set(Card.__dataclass_fields__)
    if extra := sorted(set(content) - known):
        raise InvalidValueError(f"card: unknown fields {', '.join(map(repr, extra[:5]))}")
    if missing := sorted(known - set(_OF_ONE_RUN) - set(content)):
        raise InvalidValueError(f"card: fields {', '.join(missing)} are missing")
    result = content.get("result")
    return Card(
        source=_file(content["source"], "source"),
        config_name=_text(content["config_name"], "config_name"),
        config=_mapping(content["config"], "config"),
        data=_data(_mapping(content["data"], "data")),
        versions=_texts(content["versions"], "versions"),
        plan_sha256=_hash(content["plan_sha256"], "plan_sha256"),
        seeds={name: _number(each, f"seeds.{name}") for name, each in _mapping(content["seeds"], "seeds").items()},
        functions=tuple(_text(each, "functions") for each in _list(content["functions"], "functions")),
        packing=_text(content["packing"], "packing"),
        platform=_texts(content.get("platform", {}), "platform"),
        command=_text(content.get("command", ""), "command"),
        paths=_paths(content.get("paths", {})),
        result=None if result is None else _file(result, "result"),
    )


def _data(content: dict[str, Any]) -> DataFacts:
    _exactly(content, set(DataFacts.__dataclass_fields__), "data")
    kinds = [each.value for each in DataKind]
    if content["kind"] not in kinds:
        raise InvalidValueError(f"card: data.kind {content['kind']!r}: expected one of {', '.join(kinds)}")
    count = content["count"]
    return DataFacts(
        kind=DataKind(content["kind"]),
        name=_name(content["name"], "data.name"),
        count=None if count is None else _number(count, "data.count", least=1),
        batch_size=_number(content["batch_size"], "data.batch_size", least=1),
        preprocessing=_numbers(content["preprocessing"], "data.preprocessing"),
        samples=_number(content["samples"], "data.samples"),
        held_out=_number(content["held_out"], "data.held_out"),
        sha256=_hash(content["sha256"], "data.sha256") if content["sha256"] else "",
        seed=_number(content["seed"], "data.seed"),
    )


def _file(content: Any, what: str) -> FileFacts:
    fields = _mapping(content, what)
    _exactly(fields, {"name", "bytes", "sha256"}, what)
    size = _number(fields["bytes"], f"{what}.bytes")
    return FileFacts(_name(fields["name"], f"{what}.name"), size, _hash(fields["sha256"], f"{what}.sha256"))


def _paths(content: Any) -> dict[str, str]:
    paths = _texts(content, "paths")
    for name, path in paths.items():
        is_plain = not PurePosixPath(path).is_absolute() and not PureWindowsPath(path).anchor and "\0" not in path
        if name not in ("source", "data") or not is_plain:
            raise InvalidValueError(f"card: paths.{name} {path!r}: expected a relative path of 'source' or 'data'")
    return paths


def _exactly(content: Mapping[str, Any], known: set[str], what: str) -> None:
    if set(content) != known:
        raise InvalidValueError(f"card: {what} has fields {sorted(content)}: expected {sorted(known)}")


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidValueError(f"card: {what} is {_short(value)!r}: expected a mapping")
    return dict(value)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidValueError(f"card: {what} is {_short(value)!r}: expected a list")
    return value


def _texts(value: Any, what: str) -> dict[str, str]:
    return {name: _text(each, f"{what}.{name}") for name, each in _mapping(value, what).items()}


def _numbers(value: Any, what: str) -> dict[str, Any]:
    """A number, some or None under each name."""
    for name, each in _mapping(value, what).items():
        for number in each if isinstance(each, list) else [each]:
            if isinstance(number, bool) or not (number is None or isinstance(number, (int, float))):
                raise InvalidValueError(f"card: {what}.{name} is {_short(each)!r}: expected numbers")
    return dict(value)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidValueError(f"card: {what} is {_short(value)!r}: expected text")
    return value


def _name(value: Any, what: str) -> str:
    text = _text(value, what)
    if any(each in text for each in "/\\\0") or text == "..":
        raise InvalidValueError(f"card: {what} {text!r}: expected a name without folders")
    return text


def _hash(value: Any, what: str) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise InvalidValueError(f"card: {what} is {_short(value)!r}: expected 64 hexadecimal digits")
    return value


def _number(value: Any, what: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidValueError(f"card: {what} is {_short(value)!r}: expected a number of at least {least}")
    return value
