"""The folder of a search: what was tried, so that a search that was killed goes on.

    DIR/search.json         all trials, the ranking, the front, and what the search was based on
    DIR/search.html         the plot
    DIR/trials/NAME.json    one trial, written when it is done
    DIR/models/NAME.onnx    its file and NAME.json, the report on it; those of the front, by default

A finished trial is not repeated where its basis is the same: the model, the data, the config, the versions. Otherwise
it is tried again, and the notes say why. A folder is one search's at a time, see `lock`.
"""

from __future__ import annotations

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
from quark.search.lock import LOCK, take
from quark.search.ranking import pareto_front
from quark.search.trial import Trial

OUT_OF_MEMORY = "not enough memory"
FILE_TROUBLE = "trouble with files"  # a full disk, say
PASSING = (OUT_OF_MEMORY, FILE_TROUBLE)  # begin failures of the machine: another time it may work
_PREFIX = ".trial-"
_SPOKEN = {
    "model": "the model is another one",
    "calibration": "the calibration data are other ones",
    "data": "the data that is judged on is other",
    "metric": "the metric is another one",
    "versions": "the versions of the packages differ",
    "packing": "files are packed in another way",
    "target": "the target is another one",
}


class Keep(str, Enum):
    """Which model files stay."""

    BEST = "best"  # those that none beats
    ALL = "all"
    NONE = "none"


@dataclass
class Journal:
    """`basis` says what all trials follow from, by name; `notes` gather what a user should know."""

    folder: Path
    basis: Mapping[str, str]
    keep: Keep = Keep.BEST
    notes: list[str] = field(default_factory=list)
    remedy: str = "give --out another folder"  # for a folder that cannot be used
    _lock: IO[bytes] | None = field(default=None, repr=False)

    def open(self) -> None:
        """Make the folder, take it, and say where what lies in it does not fit."""
        try:
            self._refuse_other_things()
            self.trials_folder.mkdir(parents=True, exist_ok=True)
            self.models_folder.mkdir(exist_ok=True)
            self._lock = take(self.folder / LOCK, self.remedy)
        except OSError as error:
            raise InvalidValueError(
                f"folder '{self.folder}' cannot be made or written to: {error.strerror}; {self.remedy}"
            ) from error
        for stale in self.folder.glob(f"{_PREFIX}*"):  # of a search that was killed
            shutil.rmtree(stale, ignore_errors=True)
        before = self._earlier_basis()
        changed = [name for name in self.basis if before is not None and before.get(name) != self.basis[name]]
        if changed:
            why = ", ".join(_SPOKEN.get(name, f"{name} differs") for name in changed)
            self.notes.append(f"starting anew: {why}")

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _refuse_other_things(self) -> None:
        """Files are replaced and removed by their names here: not in a folder of somebody's own."""
        is_ours = (self.folder / LOCK).exists() or (self.folder / "search.json").exists()
        if self.folder.is_dir() and not is_ours and any(self.folder.iterdir()):
            raise InvalidValueError(
                f"folder '{self.folder}' holds other things than a search: {self.remedy}, a new or an empty one"
            )

    @property
    def trials_folder(self) -> Path:
        return self.folder / "trials"

    @property
    def models_folder(self) -> Path:
        return self.folder / "models"

    def basis_of(self, candidate: Candidate) -> str:
        """The hash of everything that this trial follows from."""
        content = {**self.basis, "config": candidate.digest(), "name": candidate.name}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def finished(self, candidate: Candidate) -> Trial | None:
        """The trial of an earlier search, where it is still true."""
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
        # names in the file are not used: they would become paths, and the file may come from anybody
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
        """A folder for the files of one trial, gone when it is over."""
        with writing(self.folder):
            place = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=self.folder, ignore_cleanup_errors=True)
        with place as folder:
            yield Path(folder)

    def save(self, trial: Trial, candidate: Candidate, model: Path | None, trials: Sequence[Trial]) -> Trial:
        """Write a finished trial, and keep its file where it is to stay; the trial as it was written."""
        is_kept = model is not None and self.keep is not Keep.NONE
        if is_kept and self.keep is Keep.BEST:
            is_kept = any(each.name == trial.name for each in pareto_front([*trials, trial]))
        target = self._model_file(trial.name)
        _remove_model(target)  # of another basis
        if is_kept and model is not None:
            for file in sorted(model.parent.glob(f"{model.stem}*"), key=lambda each: each == model):
                file.replace(target.parent / file.name)  # the model last: it names its weights
        saved = replace(trial, basis=self.basis_of(candidate), model=target.name if is_kept else "")
        write_text(json.dumps(saved.to_dict(), indent=1, allow_nan=False), self._trial_file(trial.name))
        return saved

    def drop_beaten(self, trials: Sequence[Trial]) -> list[Trial]:
        """The trials after the files of those that are beaten by now are gone, where only the best stay."""
        if self.keep is not Keep.BEST:
            return list(trials)
        front = {each.name for each in pareto_front(trials)}
        for each in trials:
            if each.model and each.name not in front:
                _remove_model(self._model_file(each.name))
        return [each if each.name in front else replace(each, model="") for each in trials]

    def model_of(self, trial: Trial) -> Path | None:
        """The file of a trial, if it was kept."""
        path = self._model_file(trial.name)
        return path if trial.model and path.is_file() else None

    def remove(self) -> None:
        """Delete the folder with everything that a search leaves in it; other files of the user's stay."""
        for folder in (self.trials_folder, self.models_folder):
            shutil.rmtree(folder, ignore_errors=True)
        for name in ("search.json", "search.html", LOCK):
            (self.folder / name).unlink(missing_ok=True)
        self.close()
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def write_result(self, content: Mapping[str, Any], page: str | None = None) -> None:
        """Write what was found so far, and the page with the plot if there is one."""
        text = json.dumps({"basis": dict(self.basis), **content}, indent=1, allow_nan=False)
        write_text(text, self.folder / "search.json")
        if page is not None:
            write_text(page, self.folder / "search.html")

    def _earlier_basis(self) -> Mapping[str, Any] | None:
        path = self.folder / "search.json"
        if not path.exists():
            return None
        try:
            return Fields(read_json(path, "'search.json'"), "'search.json'").mapping("basis").content
        except InvalidValueError as error:
            self.notes.append(f"search.json is damaged ({error}); the trials themselves are looked at")
            return None

    def _trial_file(self, name: str) -> Path:
        return self.trials_folder / f"{name}.json"

    def _model_file(self, name: str) -> Path:
        return self.models_folder / f"{name}.onnx"


def _remove_model(path: Path) -> None:
    for each in (path, path.with_suffix(".json"), *path.parent.glob(f"{path.stem}-????????????.data")):
        each.unlink(missing_ok=True)
