"""Finished layers, kept so that an interrupted run resumes where it stopped, with the same result.

Each layer has one file, in a folder named by a hash of everything that the result depends on: network, plan, samples,
options, versions. A file that cannot be read is ignored with a warning, and its layer is fitted again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError
from quark.features.finetuning.problem import Fitted
from quark.files.output import complete
from quark.onnx.data.array_files import read_array_file
from quark.text import get_logger

_LOG = get_logger(__name__)


class Checkpoint:
    """Without a `folder`, layers are kept in the user's cache, and removed at the end of the run. A folder that the
    user names keeps them, so that repeating the run takes no time."""

    def __init__(self, folder: Path | None, facts: Iterable[str]) -> None:
        key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        self._is_kept = folder is not None
        self.folder = (user_cache() if folder is None else folder) / f"finetune-{key[:32]}"
        self._is_usable = True
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            self._give_up(error)

    def read(self, place: int, sizes: Mapping[str, int]) -> Fitted | None:
        """The layer with that number, if it was finished before. `sizes` are those of its `weight` and `bias`: a file
        that does not fit is ignored."""
        path = self._path(place)
        if not self._is_usable or not path.exists():
            return None
        label = f"'{path.name}'"
        try:
            return _fitted(read_array_file(path, label), sizes, label)
        except InvalidValueError as error:
            _LOG.warning("checkpoint %s is ignored: %s", path, error)
            return None

    def write(self, place: int, fitted: Fitted) -> None:
        """Write a layer, whole or not at all; if the folder cannot be written, a warning says so."""
        if not self._is_usable:
            return
        numbers = [fitted.error_before, fitted.error_after, fitted.iterations, fitted.learning_rate]
        arrays = {"numbers": np.array(numbers, np.float64), "remark": np.array(fitted.remark)}
        arrays |= {
            name: array for name, array in (("weight", fitted.weight), ("bias", fitted.bias)) if array is not None
        }
        try:
            with complete(self._path(place)) as unfinished, unfinished.open("r+b") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        except OSError as error:
            self._give_up(error)

    def finish(self) -> None:
        """Remove the layers after a complete run, unless the user named the folder."""
        if self._is_usable and not self._is_kept:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _give_up(self, error: OSError) -> None:
        self._is_usable = False
        _LOG.warning("%s: layers are not kept, so an interrupted run starts over: %s", self.folder, error)

    def _path(self, place: int) -> Path:
        return self.folder / f"{place:04d}.npz"


def _fitted(content: Mapping[str, npt.NDArray[Any]], sizes: Mapping[str, int], label: str) -> Fitted:
    """The layer in a file's arrays; raises InvalidValueError if they do not fit."""
    for name, size in {**sizes, "numbers": 4}.items():
        array = content.get(name)
        if array is None and name != "numbers":
            continue  # the layer was left as it stood
        if array is None or array.dtype.kind != "f" or array.size != size or not np.isfinite(array).all():
            raise InvalidValueError(f"{label}: '{name}' is not {size} finite numbers")
    before, after, iterations, rate = content["numbers"].reshape(-1).tolist()
    remark = content.get("remark")
    if remark is None or remark.dtype.kind != "U" or remark.size != 1:
        raise InvalidValueError(f"{label}: 'remark' is not one text")
    weight, bias = (content.get(name) for name in ("weight", "bias"))
    return Fitted(weight, bias, before, after, int(iterations), rate, str(remark.item()))


def user_cache() -> Path:
    """The system's folder for things that can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/.cache")
    return Path(base) / "quark"
