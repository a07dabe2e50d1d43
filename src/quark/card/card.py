"""The reproducibility card: everything that is needed to make a quantized file again.

It lies in two places:

    in the model     the metadata `quark.card`: what the bytes of the file follow from, and nothing else. It names no
                     file, folder or processor, so that the same making gives the same bytes wherever it happens
    beside it        MODEL.json, under `card`: the same, and what belongs to this one run: names, relative paths, the
                     platform, the command, and the hash of the result, which no file can hold of itself

A card is read strictly: it may come from anybody. Names hold no folders, paths are relative, hashes are hashes, and
numbers of samples are such as somebody might have.
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
from quark.files.foreign import MOST_NAME, RECORD, Fields, parse_json, short
from quark.formats.native import instruction_set

CARD_VERSION = 1
CARD_KEY = "quark.card"  # of the metadata of the model, and the last part of it in MODEL.json
MOST_SAMPLES = 100_000_000  # more than any data set has
_LIMITS = replace(RECORD, bytes=32 << 20)
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
    def from_json(text: str, label: str = "card") -> Card:
        """What `to_json` gave; anything else is an InvalidValueError. `label` names the card in messages."""
        return Card.from_dict(parse_json(text, label, _LIMITS), label)

    @staticmethod
    def from_dict(content: Any, label: str = "card") -> Card:
        """The same from content that was parsed already; every field is checked."""
        return _card(Fields(content, label), label)


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
        found.append(f"{where}: {_said(one)}, now {_said(two)}")


def _said(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _card(fields: Fields, label: str) -> Card:
    if "version" not in fields:
        raise InvalidValueError(f"{label}: there is no card in it: expected the JSON that quark writes beside a model")
    if fields.value("version") != CARD_VERSION:
        version = short(fields.value("version"))
        raise InvalidValueError(f"{label} of version {version}: this quark reads version {CARD_VERSION}; update it")
    known = set(Card.__dataclass_fields__)
    fields.refuse_others({*known, "version"})
    if missing := sorted(known - set(_OF_ONE_RUN) - set(fields)):
        raise InvalidValueError(f"{label}: fields {', '.join(missing)} are missing")
    seeds = fields.mapping("seeds")
    return Card(
        source=_file(fields.mapping("source")),
        config_name=fields.text("config_name"),
        config=dict(fields.mapping("config").content),
        data=_data(fields.mapping("data")),
        versions=_texts(fields.mapping("versions")),
        plan_sha256=_sha256(fields, "plan_sha256"),
        seeds={name: seeds.integer(name) for name in seeds},
        functions=fields.texts("functions"),
        packing=fields.text("packing"),
        platform=_texts(fields.mapping("platform")) if "platform" in fields else {},
        command=fields.text("command") if "command" in fields else "",
        paths=_paths(fields.mapping("paths")) if "paths" in fields else {},
        result=_file(fields.mapping("result")) if fields.has("result") else None,
    )


def _data(fields: Fields) -> DataFacts:
    fields.refuse_others(DataFacts.__dataclass_fields__)
    preprocessing = fields.mapping("preprocessing")
    for name, value in preprocessing.content.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, bool) or not (each is None or isinstance(each, (int, float))):
                preprocessing.refuse(name, "a number, or some")
    return DataFacts(
        kind=DataKind(fields.text("kind", [each.value for each in DataKind])),
        name=fields.file_name("name"),
        count=None if fields.value("count") is None else fields.integer("count", 1, MOST_SAMPLES),
        batch_size=fields.integer("batch_size", 1, MOST_SAMPLES),
        preprocessing=dict(preprocessing.content),
        samples=fields.integer("samples", 0, MOST_SAMPLES),
        held_out=fields.integer("held_out", 0, MOST_SAMPLES),
        sha256=_sha256(fields, "sha256") if fields.text("sha256") else "",
        seed=fields.integer("seed"),
    )


def _file(fields: Fields) -> FileFacts:
    fields.refuse_others(("name", "bytes", "sha256"))
    return FileFacts(fields.file_name("name"), fields.integer("bytes"), _sha256(fields, "sha256"))


def _sha256(fields: Fields, name: str) -> str:
    if not _SHA256.fullmatch(fields.text(name)):
        fields.refuse(name, "64 hexadecimal digits")
    return fields.text(name)


def _texts(fields: Fields) -> dict[str, str]:
    return {name: fields.text(name) for name in fields}


def _paths(fields: Fields) -> dict[str, str]:
    """Relative ones, of the source and the data."""
    fields.refuse_others(("source", "data"))
    for name, path in _texts(fields).items():
        is_relative = not PurePosixPath(path).is_absolute() and not PureWindowsPath(path).anchor and "\0" not in path
        if not is_relative or any(len(part) > MOST_NAME for part in path.split("/")):
            fields.refuse(name, "a relative path")
    return _texts(fields)
