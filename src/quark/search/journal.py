"""The results folder of a search, from which an interrupted search resumes.

    DIR/search.json         all trials, the ranking, the front, and what the search was based on
    DIR/search.html         the plot
    DIR/trials/NAME.json    one trial, written when it is done
    DIR/models/NAME.onnx    its file, and NAME.json, the report on it; by default only those of the front

A finished trial is repeated only if its basis has changed: the model, the data, the config or the versions. The notes
then say why. Only one search at a time can use a folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import IO, Any

from quark.errors import InvalidValueError
from quark.files.foreign import Fields, read_json
from quark.onnx.save import write_text, writing
from quark.search.candidates import Candidate
from quark.search.trial import Trial, pareto_front

OUT_OF_MEMORY = "not enough memory"
FILE_TROUBLE = "trouble with files"  # such as a full disk
PASSING = (OUT_OF_MEMORY, FILE_TROUBLE)  # failures that begin like this are the machine's: another time it may work
LOCK = ".search.lock"
_PREFIX = ".trial-"
_SPOKEN = {
    "model": "the model has changed",
    "calibration": "the calibration data has changed",
    "data": "the data to judge by has changed",
    "metric": "the metric has changed",
    "versions": "the versions of the packages have changed",
    "packing": "the way files are packed has changed",
    "target": "the target has changed",
}


class Keep(str, Enum):
    """The model files to keep."""

    BEST = "best"  # models that no other model beats
    ALL = "all"
    NONE = "none"


@dataclass
class Journal:
    """`basis` is what all trials depend on, by name; `notes` collect what a user should know."""

    folder: Path
    basis: Mapping[str, str]
    keep: Keep = Keep.BEST
    notes: list[str] = field(default_factory=list)
    remedy: str = "give --out another folder"  # suggested for a folder that cannot be used
    _lock: IO[bytes] | None = field(default=None, repr=False)

    def open(self) -> None:
        """Create and lock the folder, and note if its trials have another basis."""
        try:
            is_ours = (self.folder / LOCK).exists() or (self.folder / "search.json").exists()
            if self.folder.is_dir() and not is_ours and any(self.folder.iterdir()):
                # files are replaced and removed by name here, which is not safe in a folder of the user's own
                raise InvalidValueError(
                    f"folder '{self.folder}' holds other things than a search: {self.remedy}, a new or an empty one"
                )
            self.trials_folder.mkdir(parents=True, exist_ok=True)
            self.models_folder.mkdir(exist_ok=True)
            self._lock = _lock(self.folder / LOCK, self.remedy)
        except OSError as error:
            raise InvalidValueError(
                f"folder '{self.folder}' cannot be made or written to: {error.strerror}; {self.remedy}"
            ) from error
        for stale in self.folder.glob(f"{_PREFIX}*"):  # left by a search that was killed
            shutil.rmtree(stale, ignore_errors=True)
        before, path = None, self.folder / "search.json"
        if path.exists():
            try:
                before = Fields(read_json(path, "'search.json'"), "'search.json'").mapping("basis").content
            except InvalidValueError as error:
                self.notes.append(f"search.json is damaged ({error}); the trials themselves are read")
        changed = [name for name in self.basis if before is not None and before.get(name) != self.basis[name]]
        if changed:
            why = ", ".join(_SPOKEN.get(name, f"{name} differs") for name in changed)
            self.notes.append(f"starting over: {why}")

    def close(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def trials_folder(self) -> Path:
        return self.folder / "trials"

    @property
    def models_folder(self) -> Path:
        return self.folder / "models"

    def basis_of(self, candidate: Candidate) -> str:
        """Return a hash of everything that this trial depends on."""
        content = {**self.basis, "config": candidate.digest(), "name": candidate.name}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def finished(self, candidate: Candidate) -> Trial | None:
        """Return the trial of an earlier search if it is still valid."""
        path = self._trial_file(candidate.name)
        if not path.exists():
            return None
        try:
            label = f"trial '{path.name}'"
            trial = Trial.from_dict(read_json(path, label), label)
        except InvalidValueError as error:
            self.notes.append(f"{path.name} is damaged and tried again: {error}")
            return None
        if trial.basis != self.basis_of(candidate) or trial.failure.startswith(PASSING):
            return None
        # names in the file are not trusted, since they become paths
        target = self._model_file(candidate.name)
        return replace(
            trial,
            name=candidate.name,
            preset=candidate.preset,
            stage=candidate.stage,
            changes=candidate.changes,
            model=target.name if trial.model and target.is_file() else "",
        )

    @contextmanager
    def workplace(self) -> Iterator[Path]:
        """Yield a temporary folder for the files of one trial."""
        with writing(self.folder):
            place = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=self.folder, ignore_cleanup_errors=True)
        with place as folder:
            yield Path(folder)

    def save(self, trial: Trial, candidate: Candidate, model: Path | None, trials: Sequence[Trial]) -> Trial:
        """Write a finished trial, and keep its file if `keep` says so. Returns the trial as it was written."""
        is_kept = model is not None and self.keep is not Keep.NONE
        if is_kept and self.keep is Keep.BEST:
            is_kept = any(best.name == trial.name for best in pareto_front([*trials, trial]))
        target = self._model_file(trial.name)
        _remove_model(target)  # it has another basis
        if is_kept and model is not None:
            for file in sorted(model.parent.glob(f"{model.stem}*"), key=lambda file: file == model):
                file.replace(target.parent / file.name)  # the model last: it refers to its weights
        saved = replace(trial, basis=self.basis_of(candidate), model=target.name if is_kept else "")
        write_text(json.dumps(saved.to_dict(), indent=1, allow_nan=False), self._trial_file(trial.name))
        return saved

    def drop_beaten(self, trials: Sequence[Trial]) -> list[Trial]:
        """Remove the files of trials that are beaten by now, if only the best are kept. Returns the trials."""
        if self.keep is not Keep.BEST:
            return list(trials)
        front = {trial.name for trial in pareto_front(trials)}
        for trial in trials:
            if trial.model and trial.name not in front:
                _remove_model(self._model_file(trial.name))
        return [trial if trial.name in front else replace(trial, model="") for trial in trials]

    def model_of(self, trial: Trial) -> Path | None:
        """Return the file of a trial, if it was kept."""
        path = self._model_file(trial.name)
        return path if trial.model and path.is_file() else None

    def remove(self) -> None:
        """Delete everything that a search writes, and the folder if it is then empty."""
        for folder in (self.trials_folder, self.models_folder):
            shutil.rmtree(folder, ignore_errors=True)
        for name in ("search.json", "search.html", LOCK):
            (self.folder / name).unlink(missing_ok=True)
        self.close()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def write_result(self, content: Mapping[str, Any], page: str | None = None) -> None:
        """Write the results so far, and the page with the plot if there is one."""
        text = json.dumps({"basis": dict(self.basis), **content}, indent=1, allow_nan=False)
        write_text(text, self.folder / "search.json")
        if page is not None:
            write_text(page, self.folder / "search.html")

    def _trial_file(self, name: str) -> Path:
        return self.trials_folder / f"{name}.json"

    def _model_file(self, name: str) -> Path:
        return self.models_folder / f"{name}.onnx"


def _remove_model(path: Path) -> None:
    for file in (path, path.with_suffix(".json"), *path.parent.glob(f"{path.stem}-????????????.data")):
        file.unlink(missing_ok=True)


def _lock(path: Path, remedy: str) -> IO[bytes]:
    """Lock a file until it is closed; an error if another search holds the lock.

    The operating system releases the lock when the process ends, even if it is killed. Without such locks (Windows,
    some network disks), two searches at once are not detected.
    """
    file = path.open("ab")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.close()
            raise InvalidValueError(
                f"folder '{path.parent}': another search is at work in it; wait for it, or {remedy}"
            ) from error
    return file
