"""Images of a folder, as a network trained on ImageNet wants them.

    short side to `short_side`, bilinear -> centre crop to the model's size -> (pixel / divisor - mean) / std

`imagenet` is the usual preprocessing, `lite` that of the EfficientNet-Lite family, (x - 127) / 128, and `none` leaves
the pixels as they are, 0 to 255. A YAML file gives the fields of `Preprocessing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError, unknown_name
from quark.onnx.data.input_info import InputInfo
from quark.onnx.data.yaml_text import parse_yaml

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})
_DEFAULT_SIZE = 224
_DEFAULT_SHORT_SIDE = 256
_MARGIN = 32  # what the short side has beyond the crop at other sizes


def _as_numbers(name: str, value: Any) -> tuple[float, ...]:
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if len(numbers) not in (1, 3) or not all(isinstance(each, (int, float)) for each in numbers):
        raise InvalidValueError(f"{name} {value}: expected one number, or one for each of three channels")
    return tuple(float(each) for each in numbers)


@dataclass(frozen=True)
class Preprocessing:
    """(pixel / divisor - mean) / std for each channel; one number serves all. `short_side` and `size` None follow the
    model: its own size or 224, and the short side 256 for 224, else size + 32."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    divisor: float = 255.0
    short_side: int | None = None
    size: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", _as_numbers("mean", self.mean))
        object.__setattr__(self, "std", _as_numbers("std", self.std))
        if not all(self.std) or not self.divisor:
            raise InvalidValueError(f"std {self.std}, divisor {self.divisor}: expected no zeros")
        for name in ("short_side", "size"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InvalidValueError(f"{name} {value}: expected a positive number of pixels")

    def normalize(self, pixels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Of (height, width, channels); computed in float64 where it is not exact in float32, rounded once."""
        scaled = pixels / np.float32(self.divisor) if self.divisor != 1 else pixels
        if not any(self.mean) and all(each == 1 for each in self.std):
            return np.asarray(scaled, np.float32)
        return np.asarray((scaled - np.array(self.mean)) / np.array(self.std)).astype(np.float32)


PRESETS: Mapping[str, Preprocessing] = {
    "imagenet": Preprocessing(),
    "lite": Preprocessing(mean=(127.0,), std=(128.0,), divisor=1.0),
    "none": Preprocessing(mean=(0.0,), std=(1.0,), divisor=1.0),
}


def find_preprocessing(name: str | Path | Preprocessing) -> Preprocessing:
    """A preset by name, or the contents of a YAML file."""
    if isinstance(name, Preprocessing):
        return name
    if str(name) in PRESETS:
        return PRESETS[str(name)]
    path = Path(name)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise unknown_name("preprocessing", str(name), [*PRESETS, "FILE.yaml"])
    return _read_yaml(path)


def _read_yaml(path: Path) -> Preprocessing:
    import yaml

    try:
        content = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise InvalidValueError(f"preprocessing file {path} cannot be read: {error}") from error
    known = [each.name for each in fields(Preprocessing)]
    if not isinstance(content, dict):
        raise InvalidValueError(f"preprocessing file {path}: expected a mapping with {', '.join(known)}")
    for key in content:
        if key not in known:
            raise unknown_name(f"key of preprocessing file {path}", key, known)
    try:
        return Preprocessing(**content)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidValueError(f"preprocessing file {path}: {error}") from error


@dataclass(frozen=True)
class ImageLoader:
    """Turns files into arrays for one input, without the batch axis."""

    preprocessing: Preprocessing
    size: int
    channels: int
    has_channels_last: bool
    dtype: np.dtype[Any]

    def load(self, path: Path) -> npt.NDArray[Any]:
        from PIL import Image

        try:
            with Image.open(path) as opened:
                image = opened.convert("L" if self.channels == 1 else "RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InvalidValueError(f"image {path} cannot be read: {error}") from error
        width, height = image.size
        short = self._short_side
        if min(width, height) != short:
            factor = short / min(width, height)
            image = image.resize((round(width * factor), round(height * factor)), Image.Resampling.BILINEAR)
            width, height = image.size
        left, top = (width - self.size) // 2, (height - self.size) // 2
        cropped = image.crop((left, top, left + self.size, top + self.size))
        pixels = np.asarray(cropped, np.float32).reshape(self.size, self.size, self.channels)
        values = self._normalize(pixels)
        laid_out = values if self.has_channels_last else values.transpose(2, 0, 1)
        return np.ascontiguousarray(laid_out)

    @property
    def _short_side(self) -> int:
        default = _DEFAULT_SHORT_SIDE if self.size == _DEFAULT_SIZE else self.size + _MARGIN
        return self.preprocessing.short_side or default

    def _normalize(self, pixels: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
        if self.dtype == np.uint8:
            return pixels.astype(np.uint8)  # such a model normalizes by itself
        if self.channels == 1 and len(self.preprocessing.mean) > 1:
            means, deviations = np.mean(self.preprocessing.mean), np.mean(self.preprocessing.std)
            gray = Preprocessing((float(means),), (float(deviations),), self.preprocessing.divisor)
            return gray.normalize(pixels).astype(self.dtype)
        return self.preprocessing.normalize(pixels).astype(self.dtype)


def image_loader(info: InputInfo, preprocessing: Preprocessing) -> ImageLoader:
    """For an input of rank 4 with 1 or 3 channels, first or last. Free sizes are 224 unless the preprocessing tells."""
    shape = info.shape
    if shape is None or len(shape) != 4 or not (info.dtype.kind in "f" or info.dtype == np.uint8):
        raise InvalidValueError(f"a folder of images for input {info}: expected a float tensor of rank 4")
    has_channels_last = shape[3] in (1, 3) and shape[1] not in (1, 3)
    channels = shape[3] if has_channels_last else shape[1] if isinstance(shape[1], int) else 3
    sides = {each for each in (shape[1:3] if has_channels_last else shape[2:4]) if isinstance(each, int)}
    if channels not in (1, 3) or len(sides) > 1:
        raise InvalidValueError(f"a folder of images for input {info}: expected 1 or 3 channels and a square image")
    own = next(iter(sides), None)
    wanted = preprocessing.size
    if own and wanted and own != wanted:
        raise InvalidValueError(
            f"preprocessing to {wanted} pixels for input {info}: leave size out, or set it to {own}"
        )
    return ImageLoader(preprocessing, own or wanted or _DEFAULT_SIZE, int(channels), has_channels_last, info.dtype)


def find_images(folder: Path) -> list[Path]:
    """All images of the folder and those below, sorted by path."""
    return sorted(each for each in folder.rglob("*") if each.suffix.lower() in SUFFIXES and each.is_file())


def evenly_spaced(files: list[Path], count: int) -> list[Path]:
    """`count` of the files with about equal gaps; all of them where there are no more."""
    if count >= len(files):
        return files
    return [files[i * len(files) // count] for i in range(count)]
