"""The networks that a benchmark looks at, and the arguments that name them.

--models DIR                  the three that the published tables show: mobilenet_v2.onnx, resnet50_v1.onnx and
                              efficientnet_lite0.onnx, or those of them named by --only
--model NAME=PATH[:PREP]      any other; PREP is imagenet (the default), lite, none or a YAML file
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from bench.record import add_record_arguments
from quark.errors import QuarkError
from quark.onnx.data.images import PRESETS
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.presets import PRESETS as ROWS

DEFAULT_PREPROCESSING = "imagenet"
KNOWN = {"mobilenet_v2": "imagenet", "resnet50_v1": "imagenet", "efficientnet_lite0": "lite"}
DEFAULT_PRESETS = ["XINT8", "A8W8", "INT8_CNN_DEFAULT", "U8S8_AAWS", "MXINT8", "MXFP8E4M3", "MXFP4E2M1", "MX6"]
GROUPS = {"all": False, "finetuned": True}  # whether they finetune
PRESETS_HELP = "or a YAML config; all: every preset that does not finetune; finetuned: those that do"


@dataclass(frozen=True)
class NamedModel:
    """A float model on the disk, what tables call it, and how images become its input."""

    name: str
    path: Path
    preprocessing: str = DEFAULT_PREPROCESSING


def label(preset: str) -> str:
    """What tables call a preset, or a config in a file."""
    return Path(preset).stem if Path(preset).suffix else preset


def positive(text: str) -> int:
    """A count, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number of at least 1")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser, *, needs_calib: bool = True) -> None:
    """What every benchmark of whole networks takes."""
    parser.add_argument("--models", type=Path, metavar="DIR", help=f"folder with {', '.join(KNOWN)} as .onnx files")
    parser.add_argument("--only", nargs="+", choices=list(KNOWN), metavar="NAME", help="of --models, these alone")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=PATH[:PREP]", help="another model")
    parser.add_argument("--calib", type=Path, required=needs_calib, metavar="DIR", help="images to calibrate on")
    parser.add_argument("--presets", nargs="+", default=DEFAULT_PRESETS, metavar="NAME", help=PRESETS_HELP)
    add_record_arguments(parser)


def parse_model(text: str) -> NamedModel:
    """NAME=PATH[:PREP]. What follows the last colon is the path's own unless it is a known preprocessing or YAML.

    >>> parse_model("mine=nets/mine.onnx:lite").preprocessing
    'lite'
    """
    name, equals, rest = text.partition("=")
    if not (name and equals and rest):
        raise SystemExit(f"--model {text}: expected NAME=PATH or NAME=PATH:PREP, such as mine=nets/mine.onnx:lite")
    path, colon, preprocessing = rest.rpartition(":")
    is_preprocessing = preprocessing in PRESETS or preprocessing.lower().endswith((".yaml", ".yml"))
    if colon and not is_preprocessing and path.endswith(".onnx"):
        raise SystemExit(f"--model {text}: no preprocessing '{preprocessing}'; known: {', '.join(PRESETS)}, FILE.yaml")
    return NamedModel(name, Path(path), preprocessing) if colon and is_preprocessing else NamedModel(name, Path(rest))


def named_presets(names: list[str]) -> list[str]:
    """With what `all` and `finetuned` stand for.

    >>> "A8W8" in named_presets(["all"]), "A8W8_ADAROUND" in named_presets(["all"])
    (True, False)
    """
    found: list[str] = []
    for name in names:
        if name in GROUPS:
            found += [each for each, row in ROWS.items() if row.is_trained == GROUPS[name]]
        else:
            found.append(name)
    return list(dict.fromkeys(found))


def checked_presets(names: list[str]) -> list[str]:
    """All presets that the names stand for; one that does not exist ends the program now, not hours later."""
    presets = named_presets(names)
    try:
        for preset in presets:
            settings_of(preset)
    except QuarkError as error:
        raise SystemExit(f"--presets: {error}") from error
    # benchmarks run in folders of their own
    return [str(Path(preset).resolve()) if Path(preset).suffix else preset for preset in presets]


def chosen_models(arguments: argparse.Namespace, *, may_be_none: bool = False) -> list[NamedModel]:
    """All that the arguments name, each of them a file that is there; `presets` becomes what its names stand for."""
    arguments.presets = checked_presets(arguments.presets)
    names = arguments.only or list(KNOWN)
    folder: Path | None = arguments.models
    if folder is None and arguments.only:
        raise SystemExit("--only names files in a folder: give that with --models DIR")
    models = [] if folder is None else [NamedModel(name, folder / f"{name}.onnx", KNOWN[name]) for name in names]
    models += [parse_model(text) for text in arguments.model]
    if not models and not may_be_none:
        raise SystemExit(
            f"no model: give a folder that holds {', '.join(f'{name}.onnx' for name in KNOWN)} with --models DIR, or "
            f"any model with --model NAME=PATH"
        )
    for model in models:
        if not model.path.is_file():
            raise SystemExit(
                f"model {model.name}: there is no file '{model.path}'; put it there, name the ones you have with "
                f"--only, or give its path with --model {model.name}=PATH"
            )
    return models
