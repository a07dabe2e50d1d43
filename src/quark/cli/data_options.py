"""The options that several commands share: how data is read, and how models run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

PREPROCESS_HELP = (
    "How images are converted to arrays: imagenet (short side 256, centre crop, ImageNet's mean and standard "
    "deviation; the default), lite ((x - 127) / 128), none (0..255), or a YAML file."
)


def preprocess_option(command: Command) -> Command:
    return click.option(
        "--preprocess", default="imagenet", metavar="imagenet|lite|none|FILE.yaml", help=PREPROCESS_HELP
    )(command)


METRIC_HELP = (
    "How to measure the task: FILE.py:FUNCTION, a function that takes an ONNX Runtime session and returns a number "
    "(put a - in front if lower is better), or a built-in measure such as cosine, rank, top1, argmax, box_f1, "
    "mask_iou, psnr, ssim, cer or wer, with parameters as in 'box_f1?threshold=0.3' (docs/measures.md)."
)


def metric_option(use: str) -> Callable[[Command], Command]:
    """--metric; `use` is a sentence about what the command does with it."""
    return click.option("--metric", metavar="SPEC", help=f"{METRIC_HELP} {use}")


def data_options(command: Command) -> Command:
    """--data, --limit, --labels, --batch-size, --threads and --preprocess."""
    options = (
        click.option(
            "--data",
            required=True,
            type=click.Path(path_type=Path),
            metavar="DIR|FILE.npz",
            help="One folder per class, a folder of images, or arrays named after the model's inputs.",
        ),
        click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Use N evenly spaced samples."),
        click.option(
            "--labels",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Classes for a folder of images: a text file with lines 'NAME NUMBER'.",
        ),
        click.option("--batch-size", type=click.IntRange(min=1), default=10, show_default=True),
        click.option(
            "--threads", type=click.IntRange(min=1), metavar="T", help="Threads per model (default: all cores)."
        ),
        preprocess_option,
    )
    for option in reversed(options):
        command = option(command)
    return command
