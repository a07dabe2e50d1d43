"""--calib and what goes with it: the data that ranges come from, as arguments of `quark.onnx.quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

DEFAULT_PREPROCESS = "imagenet"

random_option = click.option(
    "--random",
    "is_random",
    is_flag=True,
    help="Use random numbers instead of data. Ranges and figures measured on them mean little.",
)


@dataclass(frozen=True)
class Calibration:
    """`count` samples of the data at `path`, evenly spaced over the sorted files; all of them where it is None.
    `is_random` is True if random numbers were asked for in the place of data."""

    path: Path | None = None
    count: int | None = None
    batch_size: int = 1
    preprocess: str = DEFAULT_PREPROCESS
    is_random: bool = False

    def __post_init__(self) -> None:
        if self.is_random and self.path is not None:
            raise click.UsageError("--random is for runs without data: give --calib or --random")

    def arguments(self) -> dict[str, Any]:
        """The data, and what differs from the defaults."""
        from quark.onnx.data import find_preprocessing

        find_preprocessing(self.preprocess)  # wrong even where nothing is to be prepared
        given = {"num_samples": self.count, "batch_size": self.batch_size, "preprocessing": self.preprocess}
        given["use_random_data"] = self.is_random
        usual = {"num_samples": None, "batch_size": 1, "preprocessing": DEFAULT_PREPROCESS, "use_random_data": False}
        changed = {name: value for name, value in given.items() if value != usual[name]}
        return {"data": None if self.path is None else str(self.path), **changed}
