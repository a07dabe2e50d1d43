"""`quark prepare-data`: an ImageNet download as folders for validation and calibration."""

from __future__ import annotations

from pathlib import Path

import click

from quark.cli.errors import ErrorReportingCommand
from quark.cli.terminal import say


@click.command("prepare-data", cls=ErrorReportingCommand)
@click.argument("val_data", type=click.Path(path_type=Path))
@click.argument("calib_data", type=click.Path(path_type=Path))
@click.option(
    "--labels",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Classes, if the file names do not contain them: lines 'NAME CLASS'.",
)
def prepare_data(val_data: Path, calib_data: Path, labels: Path | None) -> None:
    """Sort ImageNet's images into class folders.

    Sorts the images in VAL_DATA, and copies one image of each class to CALIB_DATA. VAL_DATA contains the files of
    val_images.tar.gz (NAME_n01440764.JPEG), plain images with a file of labels, or class folders already. A second run
    changes nothing.
    """
    from quark.evaluate.prepare import prepare_data

    done = prepare_data(val_data, calib_data, labels)
    say(f"{val_data}: {done.classes} classes, {done.moved} images sorted into them")
    say(f"{calib_data}: {done.copied} images copied, one for each class")
