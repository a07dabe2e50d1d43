"""Images of a folder, prepared as the network was trained on them.

    resize, bilinear -> (pixel / divisor - mean) / std

    crop        the short side becomes `short_side`, then the centre is cut out
    letterbox   the whole image fits inside the input; the rest is grey (114), as YOLO does it
    stretch     the whole image gets the input's height and width

A model file tells the size, the channels and the layout of its images, but neither the range of the numbers nor how
images were resized. `auto` takes `imagenet` for what looks like a classifier of ImageNet's images: three channels, a
square of at most 300 pixels. For other inputs it is an error that lists the names to choose from. A YAML file can set
the fields of `Preprocessing`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quark.errors import InvalidValueError, unknown_name
from quark.files.foreign import SETTINGS, open_regular, read_yaml, short
from quark.onnx.data.samples import InputInfo

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})
# PIL decodes dozens of formats, some of them by starting other programs. These are the ones that images come in.
FORMATS = ("PNG", "JPEG", "MPO", "BMP", "DIB", "GIF", "TIFF", "WEBP", "PPM")
MOST_PIXELS = 89_478_485  # of an image; PIL warns of decompression bombs from here on
MOST_BYTES = 1 << 30  # of an image file
MOST_SIDE = 1 << 14  # of an array made of an image
MOST_ENTRIES = 10_000_000  # in a folder and its subfolders
_MOST_RESIZED = 1 << 25  # pixels of a resized image; beyond them only the part that is used is computed
AUTO = "auto"
RESIZES = ("crop", "letterbox", "stretch")
_MOST_CLASSIFIED = 300  # pixels a side; larger inputs are more often those of detectors
_GREY = 114  # around letterboxed images
_DEFAULT_SIZE = 224
_DEFAULT_SHORT_SIDE = 256
_MARGIN = 32  # difference between the short side and the crop at other sizes


def _as_numbers(name: str, value: Any) -> tuple[float, ...]:
    numbers = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if len(numbers) not in (1, 3) or not all(_is_number(number) for number in numbers):
        raise InvalidValueError(f"{name} {short(value)}: expected one number, or one for each of three channels")
    return tuple(float(number) for number in numbers)


def _is_number(value: Any) -> bool:
    """True if it is a finite number, also in float32."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Preprocessing:
    """(pixel / divisor - mean) / std for each channel; a single number is for all. `short_side` and `size` None depend
    on the model: its own size or 224, and a short side of 256 for 224, else size + 32. `resize` is one of RESIZES."""

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    divisor: float = 255.0
    short_side: int | None = None
    size: int | None = None
    resize: str = "crop"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", _as_numbers("mean", self.mean))
        object.__setattr__(self, "std", _as_numbers("std", self.std))
        if not _is_number(self.divisor):
            raise InvalidValueError(f"divisor {short(self.divisor)}: expected a number")
        if not all(self.std) or not self.divisor:
            raise InvalidValueError(f"std {self.std}, divisor {self.divisor}: expected no zeros")
        for name in ("short_side", "size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= MOST_SIDE):
                raise InvalidValueError(f"{name} {short(value)}: expected a number of pixels from 1 to {MOST_SIDE}")
        if self.resize not in RESIZES:
            raise unknown_name("resize", str(self.resize), RESIZES)
        if self.resize != "crop" and self.short_side is not None:
            raise InvalidValueError(f"short_side with resize '{self.resize}': it is for 'crop'; leave one of them out")

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for a card. `resize` is left out if it is 'crop', the only way that there used to be."""
        content = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        if self.resize == "crop":
            del content["resize"]
        return content

    @property
    def name(self) -> str:
        """The preset that this is, as `find_preprocessing` takes it, or 'custom'."""
        size = "" if self.size is None else f":{self.size}"
        without_size = replace(self, size=None)
        return next((f"{name}{size}" for name, preset in PRESETS.items() if preset == without_size), "custom")

    def normalize(self, pixels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Normalize (height, width, channels). Computed in float64 unless it is exact in float32, and rounded once."""
        scaled = pixels / np.float32(self.divisor) if self.divisor != 1 else pixels
        if not any(self.mean) and all(deviation == 1 for deviation in self.std):
            return np.asarray(scaled, np.float32)
        return np.asarray((scaled - np.array(self.mean)) / np.array(self.std)).astype(np.float32)


PRESETS: Mapping[str, Preprocessing] = {
    "imagenet": Preprocessing(),
    "lite": Preprocessing(mean=(127.0,), std=(128.0,), divisor=1.0),
    "unit": Preprocessing(mean=(0.0,), std=(1.0,)),
    "minus_one_one": Preprocessing(mean=(0.5,), std=(0.5,)),
    "letterbox": Preprocessing(mean=(0.0,), std=(1.0,), resize="letterbox"),
    "stretch": Preprocessing(mean=(0.0,), std=(1.0,), resize="stretch"),
    "none": Preprocessing(mean=(0.0,), std=(1.0,), divisor=1.0),
}
MEANINGS: Mapping[str, str] = {
    "imagenet": "crop, ImageNet's mean and standard deviation",
    "lite": "crop, (x - 127) / 128",
    "unit": "crop, x / 255",
    "minus_one_one": "crop, x / 127.5 - 1",
    "letterbox": "whole image with grey borders, x / 255",
    "stretch": "whole image stretched, x / 255",
    "none": "crop, 0 to 255",
}


def find_preprocessing(name: str | Path | Preprocessing) -> Preprocessing | None:
    """A preset by name, with the size behind a colon for inputs of free size ('letterbox:640'), or the contents of a
    YAML file. None for 'auto', which `image_loader` decides."""
    if isinstance(name, Preprocessing):
        return name
    if str(name) == AUTO:
        return None
    preset, colon, size = str(name).partition(":")
    if preset in PRESETS and (not colon or size.isdecimal()):
        return replace(PRESETS[preset], size=int(size)) if colon else PRESETS[preset]
    path = Path(name)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise unknown_name("preprocessing", str(name), [AUTO, *PRESETS, "FILE.yaml"])
    content = read_yaml(path, f"preprocessing file {path}", SETTINGS)
    known = [field.name for field in fields(Preprocessing)]
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
    """Turns files into arrays for one input, without the batch axis. `is_assumed` is True if the preprocessing was not
    specified."""

    preprocessing: Preprocessing
    height: int
    width: int
    channels: int
    has_channels_last: bool
    dtype: np.dtype[Any]
    is_assumed: bool = False

    @property
    def _short_side(self) -> int:
        usual = _DEFAULT_SHORT_SIDE if self.height == _DEFAULT_SIZE else self.height + _MARGIN
        return self.preprocessing.short_side or usual

    def __str__(self) -> str:
        """Describe the preprocessing of an image, for people."""
        settings = self.preprocessing
        how = {
            "crop": f"short side {self._short_side}, centre {self.height} x {self.width}",
            "letterbox": f"inside {self.height} x {self.width} with grey borders",
            "stretch": f"stretched to {self.height} x {self.width}",
        }[settings.resize]
        mean, std = (" ".join(f"{value:g}" for value in values) for values in (settings.mean, settings.std))
        values = "x" if settings.divisor == 1 else f"x / {settings.divisor:g}"
        if any(settings.mean) or any(deviation != 1 for deviation in settings.std):
            values = f"({values} - {mean}) / {std}"
        values = "pixels 0 to 255" if self.dtype == np.uint8 or values == "x" else values
        doubt = "; assumed, because --preprocess was not given" if self.is_assumed else ""
        return f"{settings.name}: {how}, {values}{doubt}"

    def load(self, path: Path) -> npt.NDArray[Any]:
        """Read, resize and normalize an image. Raises InvalidValueError if it cannot be used."""
        image = read_image(path, "L" if self.channels == 1 else "RGB")
        settings = self.preprocessing
        try:
            if settings.resize == "crop":
                part = _resized_centre(image, self._short_side, self.height)
            else:
                part = _whole(image, self.height, self.width, has_borders=settings.resize == "letterbox")
            pixels = part.astype(np.float32).reshape(self.height, self.width, self.channels)
            if self.dtype == np.uint8:
                values: npt.NDArray[Any] = pixels.astype(np.uint8)  # such a model normalizes by itself
            elif self.channels == 1 and len(settings.mean) > 1:
                mean, std = float(np.mean(settings.mean)), float(np.mean(settings.std))
                values = Preprocessing((mean,), (std,), settings.divisor).normalize(pixels).astype(self.dtype)
            else:
                values = settings.normalize(pixels).astype(self.dtype)
            laid_out = values if self.has_channels_last else values.transpose(2, 0, 1)
            return np.ascontiguousarray(laid_out)
        except MemoryError as error:
            width, height = image.size
            raise InvalidValueError(
                f"image {path}: there is not enough memory to bring {width} x {height} pixels to {self.height} x "
                f"{self.width}; scale the image down or take it out of the data"
            ) from error


def image_loader(info: InputInfo, preprocessing: Preprocessing | None) -> ImageLoader:
    """The loader for an input of rank 4 with 1 or 3 channels, first or last. Free sizes are those of the preprocessing,
    or 224. None chooses the preprocessing by the shape, and raises InvalidValueError if that would be a wild guess."""
    shape = info.shape
    if shape is None or len(shape) != 4 or not (info.dtype.kind in "f" or info.dtype == np.uint8):
        raise InvalidValueError(f"a folder of images for input {info}: expected a float tensor of rank 4")
    has_channels_last = shape[3] in (1, 3) and shape[1] not in (1, 3)
    channels = shape[3] if has_channels_last else shape[1] if isinstance(shape[1], int) else 3
    sides = shape[1:3] if has_channels_last else shape[2:4]
    if channels not in (1, 3):
        raise InvalidValueError(f"a folder of images for input {info}: expected 1 or 3 channels")
    if any(isinstance(side, int) and side > MOST_SIDE for side in sides):
        raise InvalidValueError(f"a folder of images for input {info}: expected at most {MOST_SIDE} pixels a side")
    is_assumed = preprocessing is None
    chosen = _assumed(info, int(channels), sides) if preprocessing is None else preprocessing
    wanted = chosen.size
    known = [side for side in sides if isinstance(side, int)]
    if wanted and any(side != wanted for side in known):
        raise InvalidValueError(
            f"preprocessing to {wanted} pixels for input {info}: leave size out, or set it to {known[0]}"
        )
    other = wanted or (known[0] if known and chosen.resize == "crop" else _DEFAULT_SIZE)
    if chosen.resize != "crop" and not wanted and len(known) < len(sides):
        raise InvalidValueError(
            f"preprocessing '{chosen.name}' for input {info}, whose size is free: add the pixels, as in "
            f"'{chosen.resize}:640'"
        )
    height, width = (side if isinstance(side, int) else other for side in sides)
    if chosen.resize == "crop" and height != width:
        raise InvalidValueError(
            f"preprocessing '{chosen.name}' for input {info}: a crop is square; choose letterbox or stretch, or a YAML "
            "file with 'resize: stretch' and the mean and std of the network"
        )
    return ImageLoader(chosen, height, width, int(channels), has_channels_last, info.dtype, is_assumed)


def _assumed(info: InputInfo, channels: int, sides: Sequence[int | str | None]) -> Preprocessing:
    """The preprocessing that an input of this shape nearly always has."""
    if info.dtype == np.uint8 and len({*sides}) == 1:
        return PRESETS["none"]  # such a model normalizes by itself
    known = {side for side in sides if isinstance(side, int)}
    if channels == 3 and len(known) == 1 and max(known) <= _MOST_CLASSIFIED:
        return PRESETS["imagenet"]
    listing = ", ".join(f"{name} ({meaning})" for name, meaning in MEANINGS.items())
    raise InvalidValueError(
        f"a folder of images for input {info}: its shape does not tell how to prepare images, and a wrong guess would "
        "give wrong ranges. Choose --preprocess (in Python: preprocessing=) as in training: "
        f"{listing}, or a YAML file; for a free size add the pixels, as in 'letterbox:640'"
    )


def read_image(path: Path, mode: str) -> Image.Image:
    """Decode an image file as mode 'RGB' or 'L'; of several frames the first. Of 16 bits the upper 8 are used.

    Raises InvalidValueError, naming the file, if it is not a regular file, not of one of the FORMATS, damaged, has more
    than MOST_PIXELS, or has 32 bits a pixel, which nothing relates to 0..255.
    """
    from PIL import Image, UnidentifiedImageError

    Image.init()
    formats = [name for name in FORMATS if name in Image.OPEN]  # PIL may be built without WEBP
    too_large = f"image {path} has more than {MOST_PIXELS:,} pixels: scale it down or take it out of the data"
    with open_regular(path, f"image {path}") as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise InvalidValueError(f"image {path} has {size:,} bytes: expected at most {MOST_BYTES:,}")
        try:
            with Image.open(file, formats=formats) as opened:
                image: Image.Image | None = None
                if opened.width * opened.height <= MOST_PIXELS:
                    image = _in_eight_bits(opened).convert(mode)
        except InvalidValueError as error:
            raise InvalidValueError(f"image {path} {error}") from error
        except Image.DecompressionBombError as error:
            raise InvalidValueError(too_large) from error
        except UnidentifiedImageError as error:
            raise InvalidValueError(f"image {path} cannot be read: expected {', '.join(FORMATS)}") from error
        except MemoryError as error:
            raise InvalidValueError(
                f"image {path} does not fit into memory: scale it down or take it out of the data"
            ) from error
        except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, zlib.error and more
            raise InvalidValueError(f"image {path} cannot be read: {str(error) or type(error).__name__}") from error
    if image is None:
        raise InvalidValueError(too_large)
    return image


def _in_eight_bits(image: Image.Image) -> Image.Image:
    """The image with at most 8 bits for a channel; PIL's own conversion makes every value above 255 white."""
    from PIL import Image

    is_wide = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))  # before PIL 10.3
    if is_wide:
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    if image.mode in ("I", "F"):
        kind = "integers" if image.mode == "I" else "floats"
        raise InvalidValueError(f"has pixels of 32-bit {kind}: save it with 8 or 16 bits, or give arrays (.npy)")
    return image


def _resized_centre(image: Image.Image, short: int, size: int) -> npt.NDArray[np.uint8]:
    """The pixels of an image whose short side was resized to `short`, and whose centre was cropped to a square of
    `size`. Beyond the image the crop is black."""
    from PIL import Image

    width, height = image.size
    resized = width, height
    if min(width, height) != short:
        factor = short / min(width, height)
        resized = round(width * factor), round(height * factor)
    left, top = (resized[0] - size) // 2, (resized[1] - size) // 2
    if resized[0] * resized[1] <= max(_MOST_RESIZED, width * height):
        if resized != (width, height):
            image = image.resize(resized, Image.Resampling.BILINEAR)
        return np.asarray(image.crop((left, top, left + size, top + size)))
    # A narrow image is enlarged by its short side: one of 1 x 15000 would become 256 x 3,840,000. Only the used part is
    # computed here, with PIL's arithmetic, so that both ways are equal in every pixel.
    columns, rows = (
        range(max(start, 0), min(start + size, end)) for start, end in zip((left, top), resized, strict=True)
    )
    first_column, column_weights = _bilinear_weights(width, resized[0], columns)
    first_row, row_weights = _bilinear_weights(height, resized[1], rows)
    corner = int(first_column[0]), int(first_row[0])
    end = min(int(first_column[-1]) + 3, width), min(int(first_row[-1]) + 3, height)
    pixels = np.asarray(image.crop((*corner, *end))).astype(np.int64)
    pixels = _weighted(pixels.swapaxes(0, 1), first_column - corner[0], column_weights).swapaxes(0, 1)
    pixels = _weighted(pixels, first_row - corner[1], row_weights)
    part = np.zeros((size, size, *pixels.shape[2:]), np.uint8)
    part[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left] = pixels
    return part


def _whole(image: Image.Image, height: int, width: int, *, has_borders: bool) -> npt.NDArray[np.uint8]:
    """The pixels of the whole image in this size: its own shape inside grey borders, or stretched."""
    from PIL import Image

    if not has_borders:
        return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))
    factor = min(width / image.width, height / image.height)
    size = max(1, min(width, round(image.width * factor))), max(1, min(height, round(image.height * factor)))
    page = Image.new(image.mode, (width, height), _GREY if image.mode == "L" else (_GREY,) * 3)
    page.paste(image.resize(size, Image.Resampling.BILINEAR), ((width - size[0]) // 2, (height - size[1]) // 2))
    return np.asarray(page)


_WEIGHT_BITS = 22  # fraction bits of a weight: PIL sums pixels as integers


def _bilinear_weights(size: int, resized: int, places: range) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For an axis that is enlarged from `size` to `resized`: the first pixel that contributes to each of the places
    there, and the weights of that and the next two."""
    centre = (np.arange(places.start, places.stop) + 0.5) * (size / resized)
    first = np.maximum((centre - 0.5).astype(np.int64), 0)
    last = np.minimum((centre + 1.5).astype(np.int64), size)
    pixels = first[:, None] + np.arange(3)
    weights = np.maximum(1.0 - np.abs(pixels - centre[:, None] + 0.5), 0.0)
    weights[pixels >= last[:, None]] = 0.0
    weights /= weights[:, :1] + weights[:, 1:2] + weights[:, 2:]
    return first, (0.5 + weights * (1 << _WEIGHT_BITS)).astype(np.int64)


def _weighted(
    pixels: npt.NDArray[np.int64], first: npt.NDArray[np.int64], weights: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Sums of neighbours along the first axis, rounded to pixels."""
    axes = (-1, *(1,) * (pixels.ndim - 1))
    total = sum(pixels[np.minimum(first + tap, len(pixels) - 1)] * weights[:, tap].reshape(axes) for tap in range(3))
    return np.asarray((total + (1 << (_WEIGHT_BITS - 1))) >> _WEIGHT_BITS)


def find_images(folder: Path) -> list[Path]:
    """All images of the folder and those below, sorted by path."""
    return find_files(folder, SUFFIXES)


def find_files(folder: Path, suffixes: Collection[str], is_deep: bool = True) -> list[Path]:
    """Regular files with one of the suffixes in a folder, and in those below it unless `is_deep` is False, sorted by
    path. Links to files count, links to folders are not followed.

    A pipe, a device or a broken link with such a name is an error, rather than being skipped.
    """
    paths: list[str] = []
    count, waiting = 0, [os.fspath(folder)]
    while waiting:
        current = waiting.pop()
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    count += 1
                    if count > MOST_ENTRIES:
                        raise InvalidValueError(
                            f"folder {folder}: more than {MOST_ENTRIES:,} files and folders in it; give the one with "
                            "the data"
                        )
                    if entry.is_dir(follow_symlinks=False):
                        if is_deep:
                            waiting.append(entry.path)
                    elif os.path.splitext(entry.name)[1].lower() in suffixes:
                        if entry.is_file(follow_symlinks=False) or stat.S_ISREG(_kind(entry.path)):
                            paths.append(entry.path)
                        elif not stat.S_ISDIR(_kind(entry.path)):
                            raise InvalidValueError(
                                f"{entry.path} is a pipe, a device or a link to nothing: expected a file, take it out "
                                "of the data"
                            )
        except PermissionError as error:
            if current == os.fspath(folder):
                raise InvalidValueError(f"folder {folder} cannot be read: {error.strerror}") from error
        except OSError as error:
            raise InvalidValueError(f"folder {current} cannot be read: {error.strerror or error}") from error
    return [Path(file) for file in sorted(paths, key=lambda path: path.split(os.sep))]


def _kind(path: str) -> int:
    """The mode of the file at a path, following links; 0 if there is none."""
    try:
        return os.stat(path).st_mode
    except OSError:
        return 0


def evenly_spaced(files: list[Path], count: int) -> list[Path]:
    """`count` of the files with about equal gaps; all of them if there are no more."""
    if count >= len(files):
        return files
    return [files[i * len(files) // count] for i in range(count)]
