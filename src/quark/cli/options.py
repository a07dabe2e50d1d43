"""Options that several commands share.

KEY of --set is a field (per_channel), an extra option (Percentile), or a part of one after a dot
(MXAttributes.scale_rule). VALUE is YAML: true, 99.99, [Conv, Gemm], QuantType.QInt8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from quark.errors import InvalidValueError
from quark.files.foreign import parse_yaml, short

if TYPE_CHECKING:
    from quark.onnx.quantization.config.config import QConfig, QuantizationConfig

Command = TypeVar("Command", bound=Callable[..., Any])
Change = tuple[str, Any]


class _NamedPath(click.Path):
    """A path that is not empty, as a shell variable that was never set would make it: that would be this folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty: expected the name of a file or folder", param, ctx)
        return super().convert(value, param, ctx)


PATH = _NamedPath(path_type=Path)
COUNT = click.IntRange(min=1)
DATA_PATHS = "DIR|FILE.npz"
DEFAULT_PREPROCESS = "auto"
FILE_SUFFIXES = (".yaml", ".yml", ".json")

random_option = click.option(
    "--random",
    "is_random",
    is_flag=True,
    help="Use random numbers instead of data. Ranges and figures measured on them mean little.",
)
preprocess_option = click.option(
    "--preprocess",
    default=DEFAULT_PREPROCESS,
    metavar="NAME|FILE.yaml",
    help="How image files become arrays, as in training: imagenet (short side 256, centre crop, ImageNet's mean and "
    "standard deviation), unit (crop, x / 255), minus_one_one (crop, x / 127.5 - 1), lite (crop, (x - 127) / 128), "
    "none (crop, 0..255), letterbox (whole image with grey borders, x / 255), stretch (whole image, x / 255), or a "
    "YAML file. letterbox:640 sets the size where the model leaves it free. auto, the default, takes imagenet for "
    "square inputs of 3 channels and up to 300 pixels, and none for uint8; for other inputs, name one.",
)


def json_option(text: str = "Print JSON instead of text.") -> Callable[[Command], Command]:
    """--json."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def metric_option(use: str) -> Callable[[Command], Command]:
    """--metric; `use` is a sentence about what the command does with it."""
    text = (
        "How to measure the task: FILE.py:FUNCTION, a function that takes an ONNX Runtime session and returns a number "
        "(put a - in front if lower is better), or a built-in measure such as cosine, rank, top1, argmax, box_f1, "
        "mask_iou, psnr, ssim, cer or wer, with parameters as in 'box_f1?threshold=0.3' (docs/measures.md)."
    )
    return click.option("--metric", metavar="SPEC", help=f"{text} {use}")


def data_options(command: Command) -> Command:
    """--data, --limit, --labels, --batch-size, --threads and --preprocess."""
    options = (
        click.option(
            "--data",
            required=True,
            type=PATH,
            metavar=DATA_PATHS,
            help="One folder per class, a folder of images, or arrays named after the model's inputs.",
        ),
        click.option("--limit", type=COUNT, metavar="N", help="Use N evenly spaced samples."),
        click.option(
            "--labels",
            type=PATH,
            metavar="FILE",
            help="Classes for a folder of images: a text file with lines 'NAME NUMBER'.",
        ),
        click.option("--batch-size", type=COUNT, default=10, show_default=True),
        click.option("--threads", type=COUNT, metavar="T", help="Threads per model (default: all cores)."),
        preprocess_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


def device_option(help_text: str) -> Callable[[Command], Command]:
    """--device."""
    return click.option("--device", default="cpu", show_default=True, metavar="cpu|cuda|cuda:N", help=help_text)


@dataclass(frozen=True)
class Calibration:
    """`count` samples of the data at `path`, evenly spaced over the sorted files, or all of them if None.

    `is_random` is True if random numbers are used instead of data.
    """

    path: Path | None = None
    count: int | None = None
    batch_size: int = 1
    preprocess: str = DEFAULT_PREPROCESS
    is_random: bool = False

    def __post_init__(self) -> None:
        if self.is_random and self.path is not None:
            raise click.UsageError("--random is for runs without data: give --calib or --random")

    @property
    def source(self) -> str | None:
        return None if self.path is None else str(self.path)

    def arguments(self) -> dict[str, Any]:
        """Return the data and all values that are not the default, as arguments of `quark.onnx.quantize`."""
        from quark.onnx.data import find_preprocessing  # imported late: `quark doctor` works without ONNX Runtime

        find_preprocessing(self.preprocess)  # an unknown name is an error even without images
        given = {
            "num_samples": (self.count, None),
            "batch_size": (self.batch_size, 1),
            "preprocessing": (self.preprocess, DEFAULT_PREPROCESS),
            "use_random_data": (self.is_random, False),
        }
        changed = {name: value for name, (value, default) in given.items() if value != default}
        return {"data": self.source, **changed}


def parse_changes(ctx: click.Context, _: click.Parameter, texts: tuple[str, ...]) -> tuple[Change, ...]:
    """Parse KEY=VALUE, as a callback of click. Anything else is a usage error."""
    changes = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise click.BadParameter(f"{short(text)}: expected KEY=VALUE", ctx)
        try:
            changes.append((key, parse_yaml(value, "the value")))
        except InvalidValueError as error:
            raise click.BadParameter(f"{short(text)}: {error}", ctx) from error
    return tuple(changes)


def is_file_name(name: str) -> bool:
    """True if the value of --config names a file."""
    return name.lower().endswith(FILE_SUFFIXES)


def read_config(name: str, changes: tuple[Change, ...]) -> QuantizationConfig | QConfig:
    """Return the preset or the config file called `name`, with the changes applied."""
    from quark.onnx.quantization.config.config import get_default_config  # imported late: see above
    from quark.onnx.quantization.config.files import changed, load_config

    config = load_config(Path(name)) if is_file_name(name) else get_default_config(name)
    return changed(config, changes) if changes else config
