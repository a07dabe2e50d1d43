"""The reproducibility card: everything that is needed to rebuild a quantized file.

    in the model     the metadata `quark.card`: only what the bytes of the file depend on. It names no file, folder or
                     processor, so that the same run gives the same bytes on any machine
    beside it        MODEL.json, under `card`: the same, and facts about this run: names, relative paths, the platform,
                     the command, and the hash of the result, which the file itself cannot contain

Cards are untrusted, so they are read strictly: names have no folders, paths are relative, hashes have the right form,
and numbers of samples are bounded.
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

__all__ = [
    "CARD_KEY",
    "CARD_VERSION",
    "Card",
    "DataFacts",
    "DataKind",
    "TorchFacts",
    "differences",
    "platform_facts",
    "relative_path",
    "samples_digest",
]

CARD_VERSION = 1
CARD_KEY = "quark.card"  # in the metadata of the model; its last part is the key in MODEL.json
MOST_SAMPLES = 100_000_000  # more than any data set has
_LIMITS = replace(RECORD, bytes=32 << 20)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_OF_ONE_RUN = ("platform", "command", "paths", "result")


class DataKind(str, Enum):
    """The form of calibration data. `object` is a Python object, such as a reader, which no card can contain."""

    FOLDER = "folder"
    FILE = "file"
    OBJECT = "object"
    RANDOM = "random"
    UNUSED = "unused"  # the result does not depend on samples


@dataclass(frozen=True)
class DataFacts:
    """The data as requested and as used.

    `count` None is all data. `preprocessing` has the fields of a Preprocessing. `sha256` is `samples_digest` of the
    calibration and the held-out samples, empty if none were used. `seed` is that of random numbers.
    """

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
class TorchFacts:
    """How torch wrote a file.

    `inputs` has the type and the shape of every example input. `options` are those of the export, and `widened` the
    operators whose weights were stored in 16 bits. `state_sha256` is `quark.torch.origin.state_digest` of the quantized
    module when it was exported; `is_trained` is True if that is no longer what calibration made. `request` says what
    `quark quantize-torch` was asked for; it is empty for exports of scripts.
    """

    inputs: Mapping[str, tuple[str, tuple[int, ...]]]
    options: Mapping[str, Any]
    state_sha256: str
    is_trained: bool = False
    widened: tuple[str, ...] = ()
    request: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Card:
    """How a file was made.

    `functions` are options whose values a card cannot hold, such as Python functions; with any, the file cannot be
    rebuilt from the card. `packing` is the profile of packed weights, or empty. It and the four fields after it are not
    in the model's card, which packing does not change. `torch` is None for files that `quark.onnx` made; otherwise
    `source` is the state of the float module, under the name of its class.
    """

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
    # paths of source and data, relative to the folder of the card
    paths: Mapping[str, str] = field(default_factory=dict)
    result: FileFacts | None = None
    torch: TorchFacts | None = None

    def inside(self) -> Card:
        """Return the part that is stored in the model."""
        bare = replace(self, packing="", platform={}, command="", paths={}, result=None)
        return replace(bare, source=replace(self.source, name=""), data=replace(self.data, name=""))

    def to_dict(self) -> dict[str, Any]:
        content = {**asdict(self), "version": CARD_VERSION, "functions": list(self.functions)}
        content["data"]["kind"] = self.data.kind.value
        return {name: value for name, value in content.items() if value or name not in (*_OF_ONE_RUN, "torch")}

    def to_json(self) -> str:
        """Return one line, the same for equal cards, which `from_json` reads."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str, label: str = "card") -> Card:
        """Read what `to_json` returned; anything else raises InvalidValueError. `label` names the card in messages."""
        return Card.from_dict(parse_json(text, label, _LIMITS), label)

    @staticmethod
    def from_dict(content: Any, label: str = "card") -> Card:
        """Read parsed JSON, checking every field."""
        fields = Fields(content, label)
        if "version" not in fields:
            raise InvalidValueError(
                f"{label}: it contains no card: expected the JSON that quark writes next to a model"
            )
        if fields.value("version") != CARD_VERSION:
            version = short(fields.value("version"))
            raise InvalidValueError(f"{label} of version {version}: this quark reads version {CARD_VERSION}; update it")
        known = set(Card.__dataclass_fields__)
        fields.refuse_others({*known, "version"})
        if missing := sorted(known - {*_OF_ONE_RUN, "torch"} - set(fields)):
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
            torch=_torch(fields.mapping("torch")) if fields.has("torch") else None,
        )


def samples_digest(samples: Iterable[Mapping[str, Any]], held_out: Iterable[Mapping[str, Any]] = ()) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of arrays, in the order of their use.

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
                state.update(value_bytes(array))
            state.update(b"\n")
    return state.hexdigest()


def value_bytes(array: Any) -> bytes:
    """The values of an array. For strings, which numpy holds as objects, it has addresses instead.

    >>> import numpy as np
    >>> value_bytes(np.array(["a", "b,c"], object))
    b'["a", "b,c"]'
    """
    if array.dtype != object:
        return bytes(array.tobytes())
    return json.dumps([str(each) for each in array.reshape(-1)]).encode()


def platform_facts() -> dict[str, str]:
    """Return what may change the last bits of a sum: the processor, the code chosen for it, the number of threads."""
    return {
        "system": platform.system(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "instruction_set": instruction_set() or "none",
        "processors": str(os.cpu_count() or 0),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
    }


def relative_path(path: Path, folder: Path) -> str | None:
    """Return the path relative to the folder, with slashes; None if there is none, as between drives."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:
        return None


def differences(first: Card, second: Card) -> list[str]:
    """Return the differences between two cards as phrases: `versions.numpy: 1.26.4, now 2.0.0`.

    Compares the parts stored in the models, and the platform if both cards have it.
    """
    changes: list[str] = []
    before, after = first.inside().to_dict(), second.inside().to_dict()
    if first.platform and second.platform:
        before["platform"], after["platform"] = dict(first.platform), dict(second.platform)
    _collect(before, after, "", changes)
    return changes


def _collect(before: Any, after: Any, where: str, changes: list[str]) -> None:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted({*before, *after}, key=str):
            _collect(before.get(key), after.get(key), f"{where}.{key}" if where else str(key), changes)
    elif before != after:
        changes.append(f"{where}: {_said(before)}, now {_said(after)}")


def _said(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _data(fields: Fields) -> DataFacts:
    fields.refuse_others(DataFacts.__dataclass_fields__)
    preprocessing = fields.mapping("preprocessing")
    for name, value in preprocessing.content.items():
        for entry in value if isinstance(value, list) else [value]:
            if name == "resize" and isinstance(entry, str):
                continue
            if isinstance(entry, bool) or not (entry is None or isinstance(entry, (int, float))):
                preprocessing.refuse(name, "a number, or some")
    return DataFacts(
        kind=DataKind(fields.text("kind", [kind.value for kind in DataKind])),
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


def _torch(fields: Fields) -> TorchFacts:
    fields.refuse_others(TorchFacts.__dataclass_fields__)
    inputs, read = fields.mapping("inputs"), {}
    for name in inputs:
        value = inputs.value(name)
        is_pair = isinstance(value, list) and len(value) == 2 and isinstance(value[1], list)
        if not is_pair or not isinstance(value[0], str) or not all(_is_size(size) for size in value[1]):
            inputs.refuse(name, "a type and a shape")
        read[name] = (value[0], tuple(value[1]))
    return TorchFacts(
        inputs=read,
        options=dict(fields.mapping("options").content),
        state_sha256=_sha256(fields, "state_sha256"),
        is_trained=fields.boolean("is_trained"),
        widened=fields.texts("widened"),
        request=dict(fields.mapping("request").content),
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_SAMPLES


def _sha256(fields: Fields, name: str) -> str:
    if not _SHA256.fullmatch(fields.text(name)):
        fields.refuse(name, "64 hexadecimal digits")
    return fields.text(name)


def _texts(fields: Fields) -> dict[str, str]:
    return {name: fields.text(name) for name in fields}


def _paths(fields: Fields) -> dict[str, str]:
    """Read the relative paths of the source and the data."""
    fields.refuse_others(("source", "data"))
    for name, path in _texts(fields).items():
        is_relative = not PurePosixPath(path).is_absolute() and not PureWindowsPath(path).anchor and "\0" not in path
        if not is_relative or any(len(part) > MOST_NAME for part in path.split("/")):
            fields.refuse(name, "a relative path")
    return _texts(fields)
