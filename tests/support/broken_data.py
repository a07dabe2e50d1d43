"""Calibration data that is of no use: files and objects for a model whose one input is float32 [N, 3, 16, 16]."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tiny_models import SIZE, image

GOOD = np.zeros((4, 3, SIZE, SIZE), np.float32)


@dataclass(frozen=True)
class BrokenData:
    """`make` gives a path in the folder, or an object."""

    name: str
    make: Callable[[Path], Any]
    words: tuple[str, ...]


def _file(name: str, content: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return make


def _archive(**arrays: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        np.savez(folder / "data.npz", **arrays)
        return folder / "data.npz"

    return make


def _images(content: bytes | None) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / "images").mkdir()
        if content is not None:
            (folder / "images" / "one.png").write_bytes(content)
        return folder / "images"

    return make


def _png() -> bytes:
    content = io.BytesIO()
    image(100).save(content, format="PNG")
    return content.getvalue()


def _header(shape: str, kind: str = "'<f4'") -> bytes:
    """A file of numpy that is nothing but a header."""
    text = f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


class _Failing:
    def get_next(self) -> Any:
        raise RuntimeError("the camera is off")


class _Nothing:
    def get_next(self) -> Any:
        return None


_OBJECTS = np.array([{"a": 1}], object)
_INPUT = "'input' (float32, Nx3x16x16)"

BROKEN_FILES = (
    BrokenData("missing", lambda folder: folder / "none.npz", ("none.npz", "no such file")),
    BrokenData("folder without images", _images(None), ("images", "no images in it")),
    BrokenData("text", _file("data.txt", b"hello"), ("data.txt", "expected a folder, a .npz or a .npy file")),
    BrokenData("text called npz", _file("data.npz", b"hello"), ("data.npz", "not a readable numpy file", "np.savez")),
    BrokenData("empty npz", _file("data.npz", b""), ("data.npz", "not a readable numpy file")),
    BrokenData("half of an npz", _file("data.npz", b"PK\x03\x04" + bytes(50)), ("data.npz", "not a readable")),
    BrokenData("npz without arrays", _archive(), ("data.npz", "no arrays", _INPUT)),
    BrokenData("other names", _archive(a=GOOD, b=GOOD), ("data.npz", "arrays named a, b", _INPUT)),
    BrokenData("other shape", _archive(input=GOOD[:, :2]), ("sample 0", "(1, 2, 16, 16)", _INPUT)),
    BrokenData("other rank", _archive(input=GOOD[:, 0, 0]), ("sample 0", "(4, 16)", _INPUT)),
    BrokenData("integers", _archive(input=GOOD.astype(np.int64)), ("int64", "float32", ".astype")),
    BrokenData("texts", _archive(input=np.array(["a", "b"])), ("sample 0", "float32")),
    BrokenData("NaN", _archive(input=GOOD * np.nan), ("sample 0", "NaN or Inf")),
    BrokenData("no samples", _archive(input=GOOD[:0]), ("no samples",)),
    BrokenData("objects in npz", _archive(input=_OBJECTS), ("data.npz", "Python objects", "not loaded")),
    BrokenData("pickle called npy", _file("data.npy", pickle.dumps([1])), ("data.npy", "not loaded")),
    BrokenData("huge header", _file("data.npy", _header("(1000000000000, 3, 16, 16)")), ("data.npy", "announces")),
    BrokenData("negative header", _file("data.npy", _header("(-1, 3, 16, 16)")), ("data.npy", "not a readable")),
    BrokenData("header of nonsense", _file("data.npy", _header("nonsense")), ("data.npy", "not a readable")),
    BrokenData("half of an image", _images(_png()[:900]), ("one.png", "cannot be read")),
    BrokenData("image that is none", _images(b"nothing like that"), ("one.png", "cannot be read")),
    BrokenData("empty image", _images(b""), ("one.png", "cannot be read")),
)

BROKEN_OBJECTS = (
    BrokenData("number", lambda _: 3, ("of type int", "expected a reader")),
    BrokenData("nothing in it", lambda _: [], ("no samples",)),
    BrokenData("list of None", lambda _: [None], ("sample 0", _INPUT)),
    BrokenData("list of texts", lambda _: ["a"], ("sample 0", "expected an array of float32", "str")),
    BrokenData("failing reader", lambda _: _Failing(), ("_Failing", "sample 0", "the camera is off")),
    BrokenData("reader of nothing", lambda _: _Nothing(), ("_Nothing", "no samples")),
    BrokenData("unknown input", lambda _: [{"inputs": GOOD[:1]}], ("'inputs'", _INPUT)),
    BrokenData("one input too many", lambda _: [{"input": GOOD[:1], "more": GOOD}], ("'more'", _INPUT)),
    BrokenData("second sample of NaN", lambda _: [GOOD[:1], GOOD[:1] * np.nan], ("sample 1", "NaN or Inf")),
    BrokenData("other array", lambda _: GOOD[:, :2], ("sample 0", "(1, 2, 16, 16)")),
    BrokenData("complex array", lambda _: GOOD.astype(np.complex64), ("complex64", "float32")),
)
