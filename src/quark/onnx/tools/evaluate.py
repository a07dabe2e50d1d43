"""Compare two folders of results, file by file: cosine, L2 distance, PSNR and SSIM."""

from __future__ import annotations

import math
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.compare.measures import pair_sums, structural_similarity
from quark.errors import InvalidValueError
from quark.onnx.data.array_files import read_array_file
from quark.onnx.data.images import find_files, read_image
from quark.onnx.quantization.output_eval import calculate_psnr
from quark.onnx.tools.command import Argument, Tool
from quark.report.console import Console

__all__ = ["TOOL", "calculate_psnr", "calculate_ssim", "evaluate", "main", "parse_args"]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
SUFFIXES = (*IMAGE_SUFFIXES, ".npy")
MOST_CHANNELS = 4  # channels on the last axis of an image
PEAK_OF_BYTES = 255.0

Array = NDArray[Any]


def calculate_ssim(img1: Array, img2: Array) -> Array:
    """Mean structural similarity, relative to a peak of 255 for bytes, and to the range of the first array otherwise.

    The last two axes are height and width; or, of three axes and more, those before the last if that has at most four
    entries, which are channels then. Each plane is compared by itself. Results that are not finite count as 0.
    """
    first, second = _planes(np.asarray(img1)), _planes(np.asarray(img2))
    if not np.isfinite(second).all() or not np.isfinite(first).all() or not first.size:
        return np.array(0.0)
    peak = PEAK_OF_BYTES if np.asarray(img1).dtype == np.uint8 else float(np.ptp(first)) or 1.0
    return np.array(structural_similarity(first, second, peak))


def main(baseline_results_folder: str, quantized_results_folder: str) -> None:
    """Print mean and worst cosine, L2 distance, PSNR and SSIM of the results that both folders have.

    Results are .png, .jpg and .npy files, compared with those of the same name. Raises InvalidValueError if there are
    none, or if two of the same name differ in shape.
    """
    console, rows = Console(), []
    baseline, quantized = Path(baseline_results_folder), Path(quantized_results_folder)
    for folder in (baseline, quantized):
        if not folder.is_dir():
            raise InvalidValueError(f"results '{folder}': there is no such folder")
    for path in find_files(baseline, SUFFIXES, is_deep=False):
        other = quantized / path.name
        if not os.path.isfile(other):
            console.say(f"Failed to load: {other}")
            continue
        rows.append(_compare(path, other))
    if not rows:
        raise InvalidValueError(
            f"results '{baseline}' and '{quantized}': no file in both; expected {', '.join(SUFFIXES)} of the same names"
        )
    cosine, distance, psnr, ssim = np.array(rows).T
    console.say(f"Mean cos similarity: {cosine.mean()}")
    console.say(f"Min cos similarity: {cosine.min()}")
    console.say(f"Mean l2 distance: {distance.mean()}")
    console.say(f"Max l2 distance: {distance.max()}")
    console.say(f"Mean psnr: {psnr.mean()}")
    console.say(f"Min psnr: {psnr.min()}")
    console.say(f"Mean ssim: {ssim.mean()}")
    console.say(f"Min ssim: {ssim.min()}")


def _compare(path: Path, other: Path) -> tuple[float, float, float, float]:
    first, second = _read(path), _read(other)
    if first.shape != second.shape:
        raise InvalidValueError(
            f"results '{path}' and '{other}' are of shapes {list(first.shape)} and {list(second.shape)}: expected one "
            "shape"
        )
    sums = pair_sums(first, second)
    distance = math.inf if sums.is_broken else math.sqrt(sums.error)
    return sums.cosine, distance, float(calculate_psnr(first, second)), float(calculate_ssim(first, second))


def _read(path: Path) -> Array:
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return np.asarray(read_image(path, "RGB"))
    array = read_array_file(path, f"results '{path}'").get("")
    if array is None or array.dtype.kind not in "biuf":
        raise InvalidValueError(f"results '{path}': expected one array of numbers")
    return array


def _planes(image: Array) -> Array:
    """The planes of an image as [n, h, w]."""
    values = np.atleast_2d(image).astype(np.float64)
    if values.ndim > 2 and values.shape[-1] <= MOST_CHANNELS:
        values = np.moveaxis(values, -1, 0)
    return values.reshape(-1, *values.shape[-2:])


def evaluate(args: Namespace) -> None:
    """Compare the folders `args.baseline_results_folder` and `args.quantized_results_folder`."""
    main(args.baseline_results_folder, args.quantized_results_folder)


TOOL = Tool(
    "Compare two folders of results (.png, .jpg, .npy): cosine, L2 distance, PSNR and SSIM.",
    Argument("baseline_results_folder", "results of the float model"),
    Argument("quantized_results_folder", "results of the quantized model, under the same names"),
    work=evaluate,
)
parse_args = TOOL.parse_args

if __name__ == "__main__":
    TOOL.run()
