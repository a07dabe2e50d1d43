"""Arrays of untrusted .npy and .npz files.

A header is checked before its array is read: the file has to be as large as it announces, and all arrays together have
to fit into memory. A few hundred bytes of an archive can announce 100 GB, and unpack to as much. Python objects are not
loaded.
"""

from __future__ import annotations

import math
import os
import sys
import zipfile
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy

from quark.errors import InvalidValueError
from quark.files.foreign import open_regular
from quark.onnx.large_tensors import free_memory
from quark.report.quantities import size_text

ARRAY_SUFFIXES = (".npy", ".npz")
MOST_ARRAYS = 10_000  # in one archive
_ZIP_PREFIXES = (b"PK\x03\x04", b"PK\x05\x06")  # the second one begins an archive without entries
_PICKLE = b"\x80"
_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_array_file(path: Path, label: str, names: Collection[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of a .npz file by name, or the one of a .npy file under the name ''.

    `label` names the file in errors. With `names`, only these arrays of an archive are read, and they are required.
    """
    with open_regular(path, label) as file:
        try:
            start = file.read(len(npy.MAGIC_PREFIX))
            if start.startswith(_ZIP_PREFIXES):
                return _read_archive(file, label, names)
            return {"": _read_single(file, label, start)}
        except InvalidValueError:
            raise
        except MemoryError as error:
            raise InvalidValueError(f"{label}: its arrays do not fit into memory; give fewer samples") from error
        except Exception as error:  # numpy and zipfile raise errors of their parsers, of zlib and of the system
            reason = "it holds Python objects, which are not loaded" if "pickle" in str(error) else error
            raise InvalidValueError(f"{label}: not a readable numpy file: {reason}; np.savez writes one") from error


def _read_single(file: IO[bytes], label: str, start: bytes) -> npt.NDArray[Any]:
    if start != npy.MAGIC_PREFIX:
        if start.startswith(_PICKLE):
            raise ValueError("it holds Python objects, which are not loaded")
        raise ValueError("it does not begin as a .npy or .npz file does")
    file.seek(0)
    size = os.fstat(file.fileno()).st_size
    _check_memory(_announced_bytes(file, size, ""), label)
    file.seek(0)
    return _read_array(file)


def _read_archive(file: IO[bytes], label: str, names: Collection[str] | None) -> dict[str, npt.NDArray[Any]]:
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if len(members) > MOST_ARRAYS:
            raise InvalidValueError(f"{label}: {len(members):,} entries; expected at most {MOST_ARRAYS:,} arrays")
        by_name = {member.filename.removesuffix(".npy"): member for member in members}
        if len(by_name) < len(members):
            counts = Counter(member.filename.removesuffix(".npy") for member in members)
            raise InvalidValueError(f"{label} has two arrays '{counts.most_common(1)[0][0]}': remove one of them")
        missing = [name for name in names or () if name not in by_name]
        if missing:
            raise InvalidValueError(f"{label} has no array '{missing[0]}': it has {', '.join(by_name)}")
        wanted = {name: array for name, array in by_name.items() if names is None or name in names}
        total = 0
        for name, member in wanted.items():
            with archive.open(member) as content:
                total += _announced_bytes(content, member.file_size, f" of array '{name}'")
        _check_memory(total, label)
        arrays = {}
        for name, member in wanted.items():
            with archive.open(member) as content:
                arrays[name] = _read_array(content)
        return arrays


def _read_array(file: IO[bytes]) -> npt.NDArray[Any]:
    """Read an array. Text in it has to be Unicode; numpy does not check that, and fails when an element is read."""
    array: npt.NDArray[Any] = npy.read_array(file, allow_pickle=False)
    if array.dtype.kind == "U":
        codes = np.frombuffer(array.tobytes(), np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if codes.size and codes.max() > sys.maxunicode:
            raise ValueError("it holds text that is not Unicode")
    return array


def _announced_bytes(file: IO[bytes], size: int, where: str) -> int:
    """The size of the array that the header at the beginning of a file of `size` bytes announces."""
    version = npy.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"the header{where} has version {version[0]}.{version[1]}, which only structured arrays need")
    shape, _, dtype = _HEADERS[version](file)
    if dtype.hasobject:
        return 0  # reading it is refused
    if any(dim < 0 for dim in shape):
        raise ValueError(f"the header{where} has a negative dimension: {shape}")
    needed = math.prod(shape) * dtype.itemsize
    left = size - file.tell()
    if needed > left:
        raise ValueError(
            f"the header{where} announces {size_text(needed)} for shape {shape}, and {size_text(left)} follow"
        )
    return needed


def _check_memory(needed: int, label: str) -> None:
    free = free_memory()
    if free is not None and needed > free:
        raise InvalidValueError(
            f"{label}: its arrays take {size_text(needed)}, and {size_text(free)} of memory are free; give fewer "
            "samples, or a folder with a file for each"
        )
