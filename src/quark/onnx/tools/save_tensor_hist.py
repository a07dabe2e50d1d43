"""Draw how the activations of a model are distributed, on data of a folder.

The folder holds images, .npy files, or raw float32 numbers (.bin, .raw, .data). Images become numbers from -1 to 1.
For a model of several inputs, the folder holds raw files called INPUT_SAMPLE.bin.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from PIL import Image

from quark.errors import InvalidValueError
from quark.files.foreign import read_bytes
from quark.files.output import writing
from quark.onnx.convert.distributions import draw_activations
from quark.onnx.data.array_files import read_array_file
from quark.onnx.data.images import find_files, read_image
from quark.onnx.data.samples import InputInfo, input_infos
from quark.onnx.data.sources import concrete_shape
from quark.onnx.file_graph import read_graph
from quark.onnx.tools.command import Argument, Tool
from quark.report.console import Console
from quark.report.histogram_picture import picture_names, write_histogram

IMAGES, ARRAYS, RAW = (".png", ".jpg", ".jpeg"), (".npy",), (".bin", ".raw", ".data")
MOST_RAW_BYTES = 1 << 31

Array = NDArray[Any]


def load_raw_data(data_path: str, file_names: Sequence[str], input_shape: Sequence[int]) -> dict[str, Array]:
    """Raw float32 numbers by file, in the input's shape."""
    return {name: _raw(Path(data_path) / name, input_shape) for name in file_names}


def load_npy_data(data_path: str, file_names: Sequence[str], input_shape: Sequence[int]) -> dict[str, Array]:
    """Arrays of .npy files by file, in the input's shape: a missing batch axis is added, and channels that come first
    are moved to the end if the input has them there."""
    arrays = {}
    for name in file_names:
        path = Path(data_path) / name
        array = read_array_file(path, f"data '{path}'").get("")
        wanted = tuple(input_shape)
        if array is None:
            raise InvalidValueError(f"data '{path}': expected one array, and not an archive")
        forms = [array, array[None], *([array.transpose(1, 2, 0)[None]] if array.ndim == 3 else [])]
        fitting = next((form for form in forms if form.shape == wanted), None)
        if fitting is None:
            raise InvalidValueError(f"data '{path}' is of shape {list(array.shape)}: expected {list(wanted)}")
        arrays[name] = fitting
    return arrays


def load_img_data(data_path: str, file_names: Sequence[str], input_shape: Sequence[int]) -> dict[str, Array]:
    """Images by file, as numbers from -1 to 1 in the input's shape, with the channels in the order blue, green, red."""
    return {name: _image(Path(data_path) / name, input_shape, is_reversed=True) for name in file_names}


def load_img_data2(data_path: str, file_names: Sequence[str], input_shape: Sequence[int]) -> dict[str, Array]:
    """Images by file, as numbers from -1 to 1 in the input's shape, with the channels in the order red, green, blue."""
    return {name: _image(Path(data_path) / name, input_shape) for name in file_names}


def load_data(data_path: str, input_shape: Sequence[int]) -> dict[str, Array]:
    """The images of a folder; if there are none, its .npy files, or else its raw files."""
    for suffixes, load in ((IMAGES, load_img_data2), (ARRAYS, load_npy_data), (RAW, load_raw_data)):
        names = [path.name for path in find_files(Path(data_path), suffixes, is_deep=False)]
        if names:
            return load(data_path, names, input_shape)
    expected = ", ".join((*IMAGES, *ARRAYS, *RAW))
    raise InvalidValueError(f"data '{data_path}': no files with data in it; expected {expected}")


def load_raw_data_by_input_name(
    data_path: str, file_names: Sequence[str], input_shape: Sequence[int], model_path: str, input_name: str
) -> dict[str, Array]:
    """Raw numbers of the files called INPUT_SAMPLE.SUFFIX, by what follows the input's name. The model is not read."""
    start = input_name.replace("/", "_")
    chosen = [name for name in file_names if name.startswith(f"{start}_")]
    return {name[len(start) :]: _raw(Path(data_path) / name, input_shape) for name in chosen}


def load_data_by_input_name(
    data_path: str, input_shape: Sequence[int], model_path: str, input_name: str
) -> dict[str, Array]:
    """Raw numbers of a folder for one of several inputs. The model is not read."""
    names = [path.name for path in find_files(Path(data_path), RAW, is_deep=False)]
    arrays = load_raw_data_by_input_name(data_path, names, input_shape, model_path, input_name)
    if not arrays:
        raise InvalidValueError(
            f"data '{data_path}': no files for input '{input_name}'; expected {input_name}_SAMPLE.bin, .raw or .data"
        )
    return arrays


class HistDataReader:
    """The samples of a folder for a model, one after the other by `get_next`.

    `input_shape` is for sizes that the model does not fix: a shape, a list of them in the order of the inputs, or a
    dict by input name. Otherwise they are 1 for the batch, 224 for the sides of an image, 3 for its channels, else 16.
    """

    def __init__(
        self,
        model_path: str | Path,
        data_path: str | Path,
        input_shape: Mapping[str, Sequence[int]] | Sequence[Any] | None = None,
    ) -> None:
        inputs = input_infos(read_graph(model_path))
        folder, by_sample = str(data_path), dict[str, dict[str, Array]]()
        for index, info in enumerate(inputs):
            shape = _shape_of(info, index, input_shape)
            if len(inputs) > 1:
                loaded = load_data_by_input_name(folder, shape, str(model_path), info.name)
            else:
                loaded = load_data(folder, shape)
            for key, array in loaded.items():
                by_sample.setdefault(key, {})[info.name] = array.astype(info.dtype)
        for key, sample in by_sample.items():
            missing = [info.name for info in inputs if info.name not in sample]
            if missing:
                raise InvalidValueError(f"data '{folder}': sample '{key}' has no file for input '{missing[0]}'")
        self._samples = list(by_sample.values())
        self._next = 0

    def __len__(self) -> int:
        return len(self._samples)

    def get_next(self) -> dict[str, Array] | None:
        """Return the next sample; None after the last."""
        if self._next >= len(self._samples):
            return None
        self._next += 1
        return self._samples[self._next - 1]

    def rewind(self) -> None:
        """Start again with the first sample."""
        self._next = 0


def save_figure(calibrator: Any, saved_path: str | None = None) -> None:
    """Write the histograms that a calibrator collected, `calibrator.collector.histogram_dict`, as PNG files."""
    histograms = calibrator.collector.histogram_dict
    folder = _folder(saved_path)
    for name, file in picture_names(histograms).items():
        counts, edges = histograms[name][:2]
        write_histogram(folder / file, counts, edges, name)


def save_tensor_hist_figure(
    input_model: str | Path | onnx.ModelProto, dr: Any, output_figure_path: str | Path | None = None
) -> None:
    """Write a histogram of every floating-point tensor on the samples of a reader, as PNG files."""
    draw_activations(input_model, dr, _folder(output_figure_path))


def get_tensor_hist() -> None:
    """Run the tool on the arguments of the command line."""
    TOOL.run()


def save(args: Namespace) -> None:
    """Draw the activations of `args.input_model` on the data of `args.data_path`."""
    reader = HistDataReader(args.input_model, args.data_path)
    save_tensor_hist_figure(args.input_model, reader, args.output_path)
    Console().say(f"{args.input_model} -> {_folder(args.output_path)} ({len(reader)} samples)")


def _folder(path: str | Path | None) -> Path:
    folder = Path("." if path is None else path)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _raw(path: Path, shape: Sequence[int]) -> Array:
    content = read_bytes(path, f"data '{path}'", MOST_RAW_BYTES)
    if len(content) != 4 * math.prod(shape):
        raise InvalidValueError(
            f"data '{path}' has {len(content)} bytes: expected {4 * math.prod(shape)}, float32 of shape {list(shape)}"
        )
    return np.frombuffer(content, np.dtype("<f4")).reshape(shape)


def _image(path: Path, shape: Sequence[int], *, is_reversed: bool = False) -> Array:
    if len(shape) != 4:
        raise InvalidValueError(f"image '{path}' for an input of shape {list(shape)}: expected four dimensions")
    is_last = shape[3] in (1, 3) and shape[1] not in (1, 3)
    height, width = shape[1:3] if is_last else shape[2:4]
    channels = shape[3] if is_last else shape[1]
    if channels not in (1, 3):
        raise InvalidValueError(f"image '{path}' for an input of shape {list(shape)}: expected 1 or 3 channels")
    image = read_image(path, "L" if channels == 1 else "RGB")
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, np.float32).reshape(height, width, channels)
    pixels = pixels[..., ::-1] if is_reversed else pixels
    values = (pixels / np.float32(255) - np.float32(0.5)) * np.float32(2)
    return np.ascontiguousarray(values if is_last else values.transpose(2, 0, 1))[None]


def _shape_of(
    info: InputInfo, index: int, shapes: Mapping[str, Sequence[int]] | Sequence[Any] | None
) -> tuple[int, ...]:
    if not shapes:
        return concrete_shape(info)
    if isinstance(shapes, Mapping):
        given = shapes.get(info.name)
    else:
        given = (shapes[index] if index < len(shapes) else None) if isinstance(shapes[0], (list, tuple)) else shapes
    return concrete_shape(info) if given is None else tuple(given)


TOOL = Tool(
    "Draw a histogram of every activation on the data of a folder, as PNG files.",
    Argument("--input_model", "the model", type=Path),
    Argument("--data_path", "a folder of images, .npy files or raw float32 numbers", type=Path),
    Argument("--output_path", "the folder to write to (default: this one)", type=Path, default=None),
    work=save,
)

if __name__ == "__main__":
    get_tensor_hist()
