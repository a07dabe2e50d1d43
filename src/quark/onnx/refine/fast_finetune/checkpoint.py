"""Finished layers, kept so that a run that was interrupted goes on where it stopped, and ends in the same bytes.

One file for each layer, in a folder named after everything that the result follows from: network, plan, samples,
options, versions. A file that cannot be read is ignored with a warning, and its layer fitted anew.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from quark.files.output import complete
from quark.reconstruction.problem import Fitted

_LOG = logging.getLogger(__name__)


class Checkpoint:
    """`folder` None: in the user's own cache, and removed when the run is through; a folder that the user names keeps
    the layers, so that the same run takes no time again."""

    def __init__(self, folder: Path | None, facts: Iterable[str]) -> None:
        key = hashlib.sha256("\n".join(facts).encode()).hexdigest()
        self._is_kept = folder is not None
        self.folder = (user_cache() if folder is None else folder) / f"finetune-{key[:32]}"
        self._is_usable = True
        self._make_folder()

    def read(self, place: int) -> Fitted | None:
        """The layer with that number, where it was finished before."""
        path = self._path(place)
        if not self._is_usable or not path.is_file():
            return None
        try:
            with np.load(path, allow_pickle=False) as content:
                weight, bias = (content.get(name) for name in ("weight", "bias"))
                before, after, iterations, rate = (float(each) for each in content["numbers"])
                return Fitted(weight, bias, before, after, int(iterations), rate, str(content["remark"]))
        except Exception as error:  # numpy raises what its zip, its parser or the system does
            _LOG.warning("checkpoint %s is ignored: %s: %s", path, type(error).__name__, error)
            return None

    def write(self, place: int, fitted: Fitted) -> None:
        """All or nothing; a folder that cannot be written is a warning."""
        if not self._is_usable:
            return
        numbers = [fitted.error_before, fitted.error_after, fitted.iterations, fitted.learning_rate]
        arrays = {"numbers": np.array(numbers, np.float64), "remark": np.array(fitted.remark)}
        arrays |= {name: each for name, each in (("weight", fitted.weight), ("bias", fitted.bias)) if each is not None}
        try:
            with complete(self._path(place)) as unfinished, unfinished.open("r+b") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
        except OSError as error:
            self._give_up(error)

    def finish(self) -> None:
        """The run is through."""
        if self._is_usable and not self._is_kept:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_usable = False
        _LOG.warning("%s: layers are not kept, an interrupted run starts anew: %s", self.folder, error)

    def _path(self, place: int) -> Path:
        return self.folder / f"{place:04d}.npz"


def user_cache() -> Path:
    """The folder for things that can be made again, as the system has it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/.cache")
    return Path(base) / "quark"
