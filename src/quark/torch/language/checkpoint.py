"""Folders of Hugging Face with safetensors: read tensor by tensor, and written whole or not at all.

Names, types, shapes and sizes in a folder are untrusted. safetensors checks that the header of a file fits its data.
What is asked for is checked here before it is read. Nothing is kept open or mapped between reads, so memory holds what
was asked for and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quark.errors import InvalidValueError, MissingDependencyError, ModelError
from quark.files.foreign import MOST_NAME, RECORD, REPORT, Fields, open_regular, read_bytes, read_json
from quark.files.output import complete
from quark.torch.language.weight_layouts import Shape, Tensors

WEIGHTS, INDEX, CONFIG, GENERATION = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("config.json", "generation_config.json"),
)
# the files that a tokenizer or processor reads
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json"),
)
_MOST_COMPANION = 256 << 20
_TYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Entry:
    """The file and the position of a tensor, with its type and shape. `dtype` None: a type that nothing here reads."""

    file: Path
    dtype: torch.dtype | None
    shape: Shape


class Checkpoint:
    """The tensors of a folder by name. `entries` says what they are; `read` reads some of them."""

    def __init__(self, folder: str | os.PathLike[str], file: str | None = None) -> None:
        """`file` is the only one to read; None: as the folder says."""
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise InvalidValueError(f"'{self.folder}': expected a folder with {CONFIG} and safetensors")
        self.entries: dict[str, Entry] = {}
        for path, names in (self._files() if file is None else {self.folder / file: None}).items():
            with _opened(path) as tensors:
                there = set(tensors.keys())
                missing = sorted(names - there) if names is not None else []
                if missing:
                    raise ModelError(f"'{path}' does not have '{missing[0]}', which {INDEX} says is there")
                for name in sorted(there if names is None else names):
                    piece = tensors.get_slice(name)
                    shape = tuple(map(int, piece.get_shape()))
                    self.entries[name] = Entry(path, _TYPES.get(str(piece.get_dtype())), shape)

    def _files(self) -> dict[Path, set[str] | None]:
        """The files, with the names of the tensors that are read from each; None: all of them."""
        single, index = self.folder / WEIGHTS, self.folder / INDEX
        if single.exists():
            return {single: None}
        if not index.exists():
            raise ModelError(f"'{self.folder}' has neither {WEIGHTS} nor {INDEX}: expected a model as safetensors")
        label = f"'{index}'"
        weights = Fields(read_json(index, label, REPORT, ModelError), label, error=ModelError).mapping("weight_map")
        files: dict[Path, set[str] | None] = {}
        for name in weights:
            file = weights.text(name, most=MOST_NAME)
            if Path(file).name != file or not file.endswith(".safetensors"):
                weights.refuse(name, "the name of a safetensors file in the same folder")
            names = files.setdefault(self.folder / file, set())
            assert names is not None
            names.add(name)
        return files

    def config(self) -> Fields:
        """The content of config.json."""
        label = f"'{self.folder / CONFIG}'"
        return Fields(read_json(self.folder / CONFIG, label, RECORD, ModelError), label, error=ModelError)

    def read(self, names: Iterable[str]) -> Tensors:
        """The tensors of these names, each in memory of its own."""
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self.entries[name].file, []).append(name)
        loaded: Tensors = {}
        for file, wanted in by_file.items():
            with _opened(file) as tensors:
                for name in wanted:
                    loaded[name] = tensors.get_tensor(name).clone()
        return loaded

    def check(self, name: str, dtype: torch.dtype | None, shape: Shape) -> None:
        """Raise unless the tensor is there and has that type and shape. None: any type of floats."""
        entry = self.entries.get(name)
        if entry is None:
            raise ModelError(f"'{self.folder}' has no tensor '{name}': the file does not belong to this model")
        is_float = entry.dtype in _FLOATS
        # scales may be written in the type of the model
        fits = is_float if dtype is None or dtype is torch.float32 else entry.dtype is dtype
        if not fits or entry.shape != shape:
            expected = "float" if dtype is None else str(dtype).removeprefix("torch.")
            raise ModelError(
                f"tensor '{name}' of '{entry.file}' is {entry.dtype} of shape {entry.shape}: expected {expected} of "
                f"shape {shape}"
            )


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise MissingDependencyError("safetensors is not installed: pip install safetensors") from error
    open_regular(file, f"'{file}'", ModelError).close()
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read '{file}': {error}") from error


def companions_of(folder: str | os.PathLike[str] | None) -> dict[str, bytes]:
    """The files of a tokenizer in the folder that a model came from; none if that is not a folder."""
    path = None if not folder else Path(folder)
    if path is None or not path.is_dir():
        return {}
    files = {}
    for name in COMPANIONS:
        if (path / name).is_file():
            files[name] = read_bytes(path / name, f"'{path / name}'", _MOST_COMPANION, ModelError)
    return files


def write_shard(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file whole or not at all. The same tensors give the same bytes.

    The format is the length of a header in 8 bytes, the header as JSON, and the tensors' bytes. The package's own
    function writes a file of another name and renames it, past the lock that says that this one is being written.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # so that all are aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in ordered:
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with complete(path) as temporary, open(temporary, "r+b") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, tensor in ordered:
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_bytes(content: bytes, path: Path) -> None:
    """Write a small file whole or not at all."""
    with complete(path) as temporary, open(temporary, "r+b") as file:
        file.write(content)


def write_json(content: Any, path: Path) -> None:
    """Write a JSON file with sorted fields."""
    write_bytes((json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n").encode(), path)


def shard_name(number: int, count: int) -> str:
    """The name of a file that holds a part of the weights.

    >>> shard_name(0, 12)
    'model-00001-of-00012.safetensors'
    """
    return f"model-{number + 1:05}-of-{count:05}.safetensors"


def index_of(shards: Sequence[tuple[str, Mapping[str, Any], int]]) -> dict[str, Any]:
    """The content of the index, for shards of (file name, tensors, bytes)."""
    names = {name: file for file, tensors, _ in shards for name in tensors}
    return {"metadata": {"total_size": sum(size for _, _, size in shards)}, "weight_map": names}
