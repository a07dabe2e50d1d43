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
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from quark.account import FileFacts
from quark.card import fields
from quark.errors import InvalidValueError
from quark.formats.native import instruction_set

CARD_VERSION = 1
CARD_KEY = "quark.card"  # of the metadata of the model, and the last part of it in MODEL.json
MOST_CHARACTERS = 32 << 20
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
        return _card(fields.mapping(content, "card"))


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
        found.append(f"{where}: {fields.short(one)}, now {fields.short(two)}")


def _card(content: dict[str, Any]) -> Card:
    if "version" not in content:
        raise InvalidValueError("there is no card in it: expected MODEL.json as quark writes it beside a model")
    version = content.pop("version")
    if version != CARD_VERSION:
        raise InvalidValueError(
            f"card of version {fields.short(version)}: this quark reads version {CARD_VERSION}; update it"
        )
    known = set(Card.__dataclass_fields__)
    if extra := sorted(set(content) - known):
        raise InvalidValueError(f"card: unknown fields {', '.join(repr(fields.short(each)) for each in extra[:5])}")
    if missing := sorted(known - set(_OF_ONE_RUN) - set(content)):
        raise InvalidValueError(f"card: fields {', '.join(missing)} are missing")
    result, seeds = content.get("result"), fields.mapping(content["seeds"], "seeds")
    return Card(
        source=_file(content["source"], "source"),
        config_name=fields.text(content["config_name"], "config_name"),
        config=fields.shallow(fields.mapping(content["config"], "config"), "config"),
        data=_data(fields.mapping(content["data"], "data")),
        versions=fields.texts(content["versions"], "versions"),
        plan_sha256=fields.sha256(content["plan_sha256"], "plan_sha256"),
        seeds={name: fields.number(each, f"seeds.{name}") for name, each in seeds.items()},
        functions=tuple(fields.text(each, "functions") for each in fields.list_of(content["functions"], "functions")),
        packing=fields.text(content["packing"], "packing"),
        platform=fields.texts(content.get("platform", {}), "platform"),
        command=fields.text(content.get("command", ""), "command"),
        paths=fields.relative_paths(content.get("paths", {})),
        result=None if result is None else _file(result, "result"),
    )


def _data(content: dict[str, Any]) -> DataFacts:
    fields.exactly(content, set(DataFacts.__dataclass_fields__), "data")
    kinds = [each.value for each in DataKind]
    if content["kind"] not in kinds:
        raise InvalidValueError(
            f"card: data.kind {fields.short(content['kind'])!r}: expected one of {', '.join(kinds)}"
        )
    count = content["count"]
    return DataFacts(
        kind=DataKind(content["kind"]),
        name=fields.file_name(content["name"], "data.name"),
        count=None if count is None else fields.number(count, "data.count", least=1),
        batch_size=fields.number(content["batch_size"], "data.batch_size", least=1),
        preprocessing=fields.numbers(content["preprocessing"], "data.preprocessing"),
        samples=fields.number(content["samples"], "data.samples"),
        held_out=fields.number(content["held_out"], "data.held_out"),
        sha256=fields.sha256(content["sha256"], "data.sha256") if content["sha256"] else "",
        seed=fields.number(content["seed"], "data.seed"),
    )


def _file(content: Any, what: str) -> FileFacts:
    held = fields.mapping(content, what)
    fields.exactly(held, {"name", "bytes", "sha256"}, what)
    size = fields.number(held["bytes"], f"{what}.bytes")
    return FileFacts(
        fields.file_name(held["name"], f"{what}.name"), size, fields.sha256(held["sha256"], f"{what}.sha256")
    )
