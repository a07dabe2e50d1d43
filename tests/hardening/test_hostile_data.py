"""Data that was made to do harm, or is missing: an error that names it, before the work.

Nothing here may take much memory, wait for a pipe, start another program, or put random numbers in the place of data.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import struct
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from broken_checks import command_refused, refused
from commands import run
from PIL import Image
from tiny_models import SIZE, save_brightness_model, save_images

from quark.errors import InvalidValueError, QuarkError
from quark.evaluate import Network, open_dataset, prepare_data
from quark.inspect.diagnose import diagnose
from quark.onnx import ModelQuantizer, Preprocessing, QConfig, get_default_config, quantize
from quark.onnx.data import InputInfo, array_files, find_preprocessing, images, open_samples
from quark.onnx.data.array_files import read_array_file
from quark.onnx.data.images import find_files, find_images, image_loader, read_image
from quark.search import search

Array = np.ndarray[Any, Any]
INPUT = InputInfo("input", np.dtype(np.float32), ("N", 3, SIZE, SIZE))
GOOD = np.zeros((4, 3, SIZE, SIZE), np.float32)


@pytest.fixture(autouse=True)
def _in_time() -> Iterator[None]:
    """A test that waits for a pipe fails instead of waiting for ever."""

    def stop(*_: object) -> None:
        raise TimeoutError("it waits for something")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_brightness_model(tmp_path / "float.onnx")


# ---------------------------------------------------------------- images
def png_of(width: int, height: int, content: bytes | None = None) -> bytes:
    """A PNG file with that header; its pixels are zeros, if they are not given as compressed bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress(bytes((3 * width + 1) * height), 9) if content is None else content
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def bytes_of(kind: str, **options: Any) -> bytes:
    """A small image of noise in that format."""
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    Image.fromarray(pixels).save(file, format=kind, **options)
    return file.getvalue()


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\n(x) = quit\n%%EOF\n"
BAD_IMAGES: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "PostScript": (POSTSCRIPT, ("cannot be read", "PNG, JPEG")),
    "more pixels than PIL reads": (png_of(60_000, 60_000, b""), ("89,478,485 pixels", "scale it down")),
    "more pixels than PIL is silent about": (png_of(10_000, 10_000, b""), ("89,478,485 pixels",)),
    "a PNG cut off": (bytes_of("PNG")[:900], ("cannot be read",)),
    "a JPEG cut off": (bytes_of("JPEG")[:900], ("cannot be read",)),
    "a GIF cut off": (bytes_of("GIF")[:400], ("cannot be read",)),
    "a WEBP cut off": (bytes_of("WEBP")[:200], ("cannot be read",)),
    "a TIFF cut off": (bytes_of("TIFF")[:900], ("cannot be read",)),
    "pixels that are not compressed": (png_of(40, 40, b"nothing like that"), ("cannot be read",)),
    "no pixels": (png_of(40, 40, b""), ("cannot be read",)),
    "an icon": (b"\0\0\1\0" + bytes(60), ("cannot be read",)),
    "zeros": (bytes(200), ("cannot be read",)),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", BAD_IMAGES)
def test_a_bad_image_is_named(name: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a Ghostscript is there, which PIL would start for PostScript."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    folder = tmp_path / "images"
    folder.mkdir()
    content, words = BAD_IMAGES[name]
    (folder / "a.png").write_bytes(content)
    refused(lambda: quantize(model, folder), InvalidValueError, ("a.png", *words))
    refused(lambda: next(open_dataset(folder, Network(model)).batches(1)), InvalidValueError, ("a.png", *words))
    assert not (tmp_path / "started").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory from /proc")
def test_a_narrow_image_takes_little_memory(tmp_path: Path) -> None:
    """1 x 15000 pixels of 138 bytes: resized as a whole it would take 4 GB."""
    (tmp_path / "narrow.png").write_bytes(png_of(1, 15_000))
    (tmp_path / "wide.png").write_bytes(png_of(89_000_000, 1))
    program = f"""
import numpy as np
from pathlib import Path
from quark.onnx.data import InputInfo, Preprocessing
from quark.onnx.data.images import image_loader

def peak():  # of this program alone; getrusage starts from what the process had that began it
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])

loader = image_loader(InputInfo("x", np.dtype(np.float32), ("N", 3, 224, 224)), Preprocessing())
folder = Path({str(tmp_path)!r})
print(loader.load(folder / "narrow.png").shape, peak())
print(loader.load(folder / "wide.png").shape, peak())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == ["(3, 224, 224)"] * 2
    narrow, wide = (int(line.rpartition(" ")[2]) / 1024 for line in lines)
    assert narrow < 500
    assert wide < 1500  # the pixels as PIL holds them, twice


def plainly(image: Image.Image, short: int, size: int) -> Array:
    """Short side, then crop: by PIL alone."""
    width, height = image.size
    factor = short / min(width, height)
    image = image.resize((round(width * factor), round(height * factor)), Image.Resampling.BILINEAR)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return np.asarray(image.crop((left, top, left + size, top + size)))


def test_the_part_of_a_narrow_image_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_MOST_RESIZED", 0)
    random = np.random.default_rng(0)
    for number in range(300):
        width, height = (int(integer) for integer in random.integers(1, (60, 900)))
        short, size = (int(integer) for integer in random.integers(1, 90, 2))
        shape = (height, 1 if number % 7 == 0 else width, *((3,) if number % 2 else ()))
        pixels = random.integers(0, 256, shape, np.uint8)
        image = Image.fromarray(pixels if number % 3 else 255 * (pixels > 127).astype(np.uint8))
        np.testing.assert_array_equal(images._resized_centre(image, short, size), plainly(image, short, size))


def animated() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("P", (40, 30), number) for number in range(3)]
    frames[0].save(file, format="GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def in_mode(mode: str, kind: str) -> bytes:
    file = io.BytesIO()
    random = np.random.default_rng(1)
    if mode == "I;16":
        image = Image.fromarray(random.integers(0, 1 << 16, (30, 40), np.uint16))
    elif mode in "IF":
        image = Image.fromarray(random.integers(0, 1 << 16, (30, 40)).astype(np.int32 if mode == "I" else np.float32))
    else:
        image = Image.fromarray(random.integers(0, 256, (30, 40, 4), np.uint8), "RGBA").convert(mode)
    image.save(file, format=kind)
    return file.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return bytes_of("JPEG", exif=exif)


USUAL_IMAGES = {
    **{kind: bytes_of(kind) for kind in ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "DIB")},
    **{f"{kind} of {mode}": in_mode(mode, kind) for kind, mode in [
        ("PNG", "1"), ("PNG", "L"), ("PNG", "LA"), ("PNG", "P"), ("PNG", "RGBA"), ("TIFF", "CMYK"),
        ("JPEG", "CMYK"), ("JPEG", "L"), ("WEBP", "RGBA"),
    ]},
    "frames": animated(),
    "EXIF": turned(),
    "pictures of a camera": bytes_of("MPO", save_all=True, append_images=[Image.new("RGB", (50, 40))]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
@pytest.mark.parametrize("name", USUAL_IMAGES)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_usual_images_are_what_pil_makes_of_them(name: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"  # whatever is in it
    path.write_bytes(USUAL_IMAGES[name])
    with Image.open(path) as opened:
        expected = np.asarray(opened.convert(mode))
    np.testing.assert_array_equal(np.asarray(read_image(path, mode)), expected)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_of_16_bits_the_upper_8_are_used(kind: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(in_mode("I;16", kind))
    with Image.open(path) as opened:
        expected = (np.asarray(opened) >> 8).astype(np.uint8)
    np.testing.assert_array_equal(np.asarray(read_image(path, mode)).reshape(30, 40, -1)[..., 0], expected)


@pytest.mark.parametrize(("mode", "word"), [("F", "floats"), ("I", "integers")])
def test_32_bits_a_pixel_are_refused(mode: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    path.write_bytes(in_mode(mode, "TIFF"))
    refused(lambda: read_image(path, "RGB"), InvalidValueError, ("a.tif", f"32-bit {word}", ".npy"))


# ---------------------------------------------------------------- folders
def pipe(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


def linked_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "pipe": pipe,
    "socket": listening,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to a pipe": linked_pipe,
    "link to nothing": lambda path: path.symlink_to("gone"),
    "link to itself": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("name", IRREGULAR)
def test_what_is_not_a_file_is_not_opened(
    name: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    folder = save_images(tmp_path / "images", 2)
    IRREGULAR[name](folder / "a_dark" / "x.png")
    refused(lambda: quantize(model, folder), InvalidValueError, ("x.png", "expected a file"))
    refused(lambda: open_dataset(folder, Network(model)), InvalidValueError, ("x.png", "expected a file"))
    refused(lambda: read_image(folder / "a_dark" / "x.png", "RGB"), InvalidValueError, ("x.png", "cannot be read"))
    IRREGULAR[name](tmp_path / "data.npz")
    words = ("data.npz", "cannot be read")
    refused(lambda: quantize(model, tmp_path / "data.npz"), InvalidValueError, words)
    refused(lambda: open_dataset(tmp_path / "data.npz", Network(model)), InvalidValueError, words)


def test_links_and_folders_are_found_as_before(tmp_path: Path) -> None:
    root = tmp_path / "images"
    (root / "a" / "deep.png").mkdir(parents=True)
    names = ["a/deep.png/z.png", "a/1.PNG", "a-b/0.jpg", "b.png", "a/2.txt"]
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"x")
    (root / "linked.png").symlink_to("b.png")
    (root / "round").symlink_to(".")  # a folder in itself
    (root / "round.png").symlink_to("..")
    expected = sorted(each for each in root.rglob("*") if each.suffix.lower() in images.SUFFIXES and each.is_file())
    assert find_images(root) == expected
    assert [each.relative_to(root).as_posix() for each in expected] == [
        *("a/1.PNG", "a/deep.png/z.png", "a-b/0.jpg", "b.png", "linked.png")
    ]
    assert [file.name for file in find_files(root, (".png",), is_deep=False)] == ["b.png", "linked.png"]


def test_a_folder_without_end_is_refused(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_images(tmp_path / "images", 30)
    monkeypatch.setattr(images, "MOST_ENTRIES", 50)
    refused(lambda: quantize(model, folder), InvalidValueError, (str(folder), "more than 50 files"))


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.webp"
    path.write_bytes(bytes_of("WEBP"))
    os.truncate(path, 1 << 40)
    refused(lambda: read_image(path, "RGB"), InvalidValueError, ("a.webp", "bytes", "at most"))


class _Greedy:
    def get_next(self) -> Any:
        raise MemoryError


def test_memory_that_runs_out_says_what_to_do(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(lambda: quantize(model, _Greedy()), InvalidValueError, ("sample 0", "memory", "smaller"))
    folder = save_images(tmp_path / "images", 2)

    def greedy(*_: object) -> Any:
        raise MemoryError

    monkeypatch.setattr(images, "_resized_centre", greedy)
    refused(lambda: quantize(model, folder), InvalidValueError, ("000.png", "48 x 40 pixels", "scale the image down"))


# ---------------------------------------------------------------- arrays
def header(shape: str, kind: str = "'<f4'", order: bool = False, version: int = 1) -> bytes:
    text = f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}".ljust(117) + "\n"
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode()


def archive(content: bytes, entry: str = "input.npy") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr(entry, content)
    return file.getvalue()


def claiming(content: bytes, size: int) -> bytes:
    """An archive whose directory says that its entry is of that size."""
    made = bytearray(archive(content))
    directory = made.index(b"PK\x01\x02")
    made[directory + 24 : directory + 28] = struct.pack("<I", size)
    return bytes(made)


FLOATS = GOOD.tobytes()
SHAPE = str(GOOD.shape)


def twice() -> bytes:
    """An archive with two arrays of one name, of which numpy reads the last."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile's own
        for _ in range(2):
            out.writestr("input.npy", header(SHAPE) + FLOATS)
    return file.getvalue()


BAD_ARRAYS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "100 GB in a header": (header("(25000000000,)"), ("announces 100.00 GB",)),
    "more than there are bytes": (header(f"({10**30}, 3)"), ("announces",)),
    "one value short": (header(SHAPE) + FLOATS[:-1], ("announces",)),
    "a negative size": (header("(-1, 3, 16, 16)") + FLOATS, ("negative",)),
    "sizes that are no numbers": (header("('a',)"), ("not a readable",)),
    "a header that is code": (header("__import__('os').getcwd()"), ("not a readable",)),
    "a header without end": (header("(" * 5000), ("not a readable",)),
    "Python objects": (header("(1,)", "'|O'") + b"\x80\x04N.", ("Python objects",)),
    "version 3": (header("(1,)", version=3), ("version 3.0",)),
    "version 9": (header("(1,)", version=9), ("not a readable",)),
    "100 GB in an archive": (archive(header("(25000000000,)")), ("announces",)),
    "4 GB as the directory says": (claiming(header("(1000000000,)"), 4_000_000_128), ("data.npz",)),
    "an entry that is no array": (archive(b"hello"), ("not a readable",)),
    "a directory cut off": (archive(header(SHAPE) + FLOATS)[:-30], ("not a readable",)),
    "pixels cut off": (archive(header(SHAPE) + FLOATS[:-4]), ("announces",)),
    "texts": (archive(header("(1,)", "'<U4'") + bytes(16)), ("data.npz", "str")),
    "records": (archive(header("(1,)", "[('a', '<f4'), ('b', '<f4')]") + bytes(8)), ("structured",)),
    "complex": (archive(header("(1, 3, 16, 16)", "'<c8'") + bytes(8 * 768)), ("complex64", "float32")),
    "dates": (archive(header("(1, 3, 16, 16)", "'<M8[s]'") + bytes(8 * 768)), ("datetime64",)),
    "a name twice": (twice(), ("two arrays 'input'",)),
    "bytes swapped": (archive(header("(1, 3, 16, 16)", "'>f4'") + bytes(4 * 768)), ("float32",)),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_a_bad_array_file_is_named(name: str, tmp_path: Path, model: Path) -> None:
    content, words = BAD_ARRAYS[name]
    path = tmp_path / "data.npz"
    path.write_bytes(content)
    words = tuple(word for word in words if word != "data.npz")
    refused(lambda: quantize(model, path), QuarkError, words)
    if name != "bytes swapped":  # numbers all the same, which evaluating converts
        refused(lambda: open_dataset(path, Network(model)), InvalidValueError, ("data.npz",))


def test_arrays_have_to_fit_into_memory(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A true bomb: a few kilobytes that unpack to what the header says."""
    path = tmp_path / "data.npz"
    path.write_bytes(archive(header(SHAPE) + FLOATS))
    assert len(path.read_bytes()) < 1000
    monkeypatch.setattr(array_files, "free_memory", lambda: 12_000)
    refused(lambda: quantize(model, path), InvalidValueError, ("data.npz", "12.3 KB", "12.0 KB of memory are free"))
    monkeypatch.setattr(array_files, "free_memory", lambda: 13_000)
    assert quantize(model, path).report.outputs


def test_an_archive_of_many_entries_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "data.npz", **{f"a{number}": np.zeros(1) for number in range(20)})
    monkeypatch.setattr(array_files, "MOST_ARRAYS", 10)
    refused(lambda: read_array_file(tmp_path / "data.npz", "it"), InvalidValueError, ("20 entries", "at most 10"))


@pytest.mark.parametrize("kind", ["npy", "npz", "compressed npz"])
def test_good_array_files_are_read(kind: str, tmp_path: Path) -> None:
    array = np.asfortranarray(np.random.default_rng(0).standard_normal((5, 3, SIZE, SIZE)).astype(np.float32))
    path = tmp_path / f"data.{kind[-3:]}"
    if kind == "npy":
        np.save(path, array)
    else:
        (np.savez if kind == "npz" else np.savez_compressed)(path, input=array, labels=np.arange(5))
    (found,) = (each for name, each in read_array_file(path, "it").items() if name != "labels")
    np.testing.assert_array_equal(found, array)
    samples = list(open_samples(path, [INPUT]).in_order())
    np.testing.assert_array_equal(np.concatenate([sample["input"] for sample in samples]), array)
    assert all(sample["input"].flags.c_contiguous for sample in samples)


# ---------------------------------------------------------------- samples
class _Array:
    def __array__(self, *_: object, **__: object) -> Any:
        raise RuntimeError("no values today")


itself: list[Any] = []
itself.append(itself)

BAD_SAMPLES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "bfloat16 of ml_dtypes": (lambda: GOOD[:1].astype(ml_dtypes.bfloat16), ("bfloat16", ".astype('float32')")),
    "bfloat16 of torch": (lambda: torch.zeros(1, 3, SIZE, SIZE, dtype=torch.bfloat16), ("bfloat16", "float32")),
    "float8 of torch": (lambda: torch.zeros(1, 3, SIZE, SIZE).to(torch.float8_e5m2), ("numpy",)),
    "sparse": (lambda: torch.zeros(1, 3, SIZE, SIZE).to_sparse(), ("Tensor", "numpy")),
    "without values": (lambda: torch.zeros(1, 3, SIZE, SIZE, device="meta"), ("Tensor", "numpy")),
    "complex": (lambda: GOOD[:1].astype(np.complex64), ("complex64", "float32")),
    "objects": (lambda: GOOD[:1].astype(object), ("object", "float32")),
    "texts": (lambda: GOOD[:1].astype(str), ("str", "float32")),
    "records": (lambda: np.zeros((1, 3, SIZE, SIZE), [("a", "f4"), ("b", "f4")]), ("structured", "float32")),
    "void": (lambda: np.zeros((1, 3, SIZE, SIZE), "V4"), ("void", "float32")),
    "no values": (lambda: GOOD[:0], ("(0, 3, 16, 16)", "holds no value")),
    "NaN": (lambda: GOOD[:1] * np.nan, ("768 of 768 values are NaN or Inf",)),
    "Inf of torch": (lambda: torch.full((1, 3, SIZE, SIZE), torch.inf), ("NaN or Inf",)),
    "an array that fails": (_Array, ("_Array", "no values today")),
    "a number beyond float": (lambda: [[10**400]], ("expected an array of float32",)),
    "a list in itself": (lambda: itself, ()),
}


@pytest.mark.parametrize("name", BAD_SAMPLES)
def test_a_bad_sample_is_named_before_the_work(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.onnx.quantization.pipeline.optimize", lambda *_: pytest.fail("it began to work"))
    make, words = BAD_SAMPLES[name]
    where = ("sample 1", "input 'input'")
    refused(lambda: quantize(model, [{"input": GOOD[:1]}, {"input": make()}]), QuarkError, (*where, *words))
    refused(lambda: quantize(model, {"input": make()}), QuarkError, ())
    refused(lambda: quantize(model, [make()]), QuarkError, ())


def test_bfloat16_goes_to_a_model_of_bfloat16() -> None:
    info = InputInfo("x", np.dtype(ml_dtypes.bfloat16), ("N", 2))
    values = torch.tensor([[1.0, -2.5]], dtype=torch.bfloat16)
    for sample in (values, values.float().numpy().astype(ml_dtypes.bfloat16)):
        (found,) = open_samples([sample], [info]).in_order()
        assert found["x"].dtype == ml_dtypes.bfloat16
        assert found["x"].astype(np.float32).tolist() == [[1.0, -2.5]]
    refused(lambda: open_samples([values * torch.nan], [info]), InvalidValueError, ("NaN or Inf",))


class _Rows:
    """A reader of bare arrays, which have no truth value."""

    def __init__(self) -> None:
        self._left = [GOOD[:1]] * 3

    def get_next(self) -> Any:
        return self._left.pop() if self._left else None


def test_a_reader_may_give_arrays() -> None:
    assert len(list(open_samples(_Rows(), [INPUT]).in_order())) == 3


BAD_FIELDS = {
    "std: .inf": ("std",),
    "std: [.nan, 1, 1]": ("std",),
    "std: 0": ("std",),
    "std: 1e300": ("std",),
    "std: true": ("std",),
    "mean: .nan": ("mean",),
    "mean: [1, 2]": ("mean",),
    "mean: text": ("mean",),
    "divisor: .inf": ("divisor",),
    "divisor: 0": ("divisor",),
    "divisor: [1]": ("divisor",),
    "size: -1": ("size",),
    "size: 0": ("size",),
    "size: 1000000000": ("size", "16384"),
    "size: 2.5": ("size",),
    "short_side: -256": ("short_side",),
    "short_side: 1000000000": ("short_side", "16384"),
    f"size: 1{'0' * 5000}": ("size",),
}


@pytest.mark.parametrize("text", BAD_FIELDS, ids=lambda text: text[:24])
def test_bad_preprocessing_is_named_before_the_work(text: str, tmp_path: Path, model: Path) -> None:
    path, folder = tmp_path / "p.yaml", save_images(tmp_path / "images", 2)
    path.write_text(text)
    words = ("p.yaml", *BAD_FIELDS[text])
    refused(lambda: find_preprocessing(path), InvalidValueError, words)
    arguments = ["quantize", model, tmp_path / "out.onnx", "--calib", folder, "--preprocess", path]
    command_refused(tmp_path, arguments, words)


def test_a_model_of_huge_images_is_no_reason_to_make_them() -> None:
    info = InputInfo("x", np.dtype(np.float32), (1, 3, 10**6, 10**6))
    refused(lambda: image_loader(info, Preprocessing()), InvalidValueError, ("1000000", "16384"))


# ---------------------------------------------------------------- labels
BAD_LABELS: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "a number of 5000 digits": (b"000.png " + b"9" * 5000 + b"\n", ("expected lines",)),
    "a negative number": (b"000.png -1\n", ("expected lines",)),
    "no number": (b"000.png\n", ("expected lines",)),
    "no text": (b"\xff\xfe\x00", ("UTF-8",)),
    "nothing": (b"", ("says nothing of",)),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_a_bad_file_of_labels_is_named(name: str, tmp_path: Path, model: Path) -> None:
    folder = save_images(tmp_path / "images", 1) / "a_dark"
    content, words = BAD_LABELS[name]
    (tmp_path / "labels.txt").write_bytes(content)
    network = Network(model)
    refused(
        lambda: open_dataset(folder, network, labels=tmp_path / "labels.txt"),
        InvalidValueError,
        ("labels.txt", *words),
    )
    refused(
        lambda: prepare_data(folder, tmp_path / "calib", tmp_path / "labels.txt"), InvalidValueError, ("labels.txt",)
    )


def test_labels_are_not_read_from_a_pipe(tmp_path: Path, model: Path) -> None:
    folder = save_images(tmp_path / "images", 1) / "a_dark"
    os.mkfifo(tmp_path / "labels.txt")
    network = Network(model)
    words = ("labels.txt",)
    refused(
        lambda: open_dataset(folder, network, labels=tmp_path / "labels.txt"), InvalidValueError, (*words, "a pipe")
    )
    refused(lambda: prepare_data(folder, tmp_path / "calib", tmp_path / "labels.txt"), InvalidValueError, words)


@pytest.mark.parametrize(
    "labels", [np.zeros(4), np.full(4, np.nan), np.zeros((4, 1), int), np.array(["a"] * 4)], ids=str
)
def test_labels_of_an_archive_are_integers(labels: Array, tmp_path: Path, model: Path) -> None:
    np.savez(tmp_path / "data.npz", input=GOOD, labels=labels)
    refused(lambda: open_dataset(tmp_path / "data.npz", Network(model)), InvalidValueError, ("data.npz", "'labels'"))


# ---------------------------------------------------------------- missing data
def random_config() -> Any:
    config = get_default_config("XINT8")
    config.extra_options["UseRandomData"] = True
    return config


ASKED: dict[str, Callable[[Path], Any]] = {
    "argument": lambda model: quantize(model, None, "XINT8", use_random_data=True),
    "option": lambda model: quantize(model, None, random_config()),
    "option beside data": lambda model: quantize(model, GOOD, random_config()),
    "reader=None written out": lambda model: ModelQuantizer(QConfig.get_default_config("XINT8")).quantize_model(
        model, calibration_data_reader=None
    ),
    "no need": lambda model: quantize(model, None, "MXINT8"),
    "no need of a reader": lambda model: ModelQuantizer(QConfig.get_default_config("MXINT8")).quantize_model(model),
    "comparing": lambda model: diagnose(model, quantize(model, GOOD).model, use_random_data=True),
}

NOT_ASKED: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "nothing": (lambda model: quantize(model), ("'INT8_CNN_DEFAULT' needs calibration", "--random", "UseRandomData")),
    "None": (lambda model: quantize(model, None, "A8W8"), ("'A8W8' needs calibration data",)),
    "finetuning": (lambda model: quantize(model, None, "MXINT8_ADAQUANT"), ("'MXINT8_ADAQUANT' needs",)),
    "both": (lambda model: quantize(model, GOOD, use_random_data=True), ("use_random_data",)),
    "an empty list": (lambda model: quantize(model, []), ("no samples", "--random")),
    "no reader": (
        lambda model: ModelQuantizer(QConfig.get_default_config("XINT8")).quantize_model(model),
        ("needs calibration data",),
    ),
    "auto": (lambda model: quantize(model, None, "auto"), ("needs data",)),
    "comparing": (lambda model: diagnose(model, model), ("--calib", "--random")),
    "comparing on both": (lambda model: diagnose(model, model, GOOD, use_random_data=True), ("--random",)),
    "searching": (lambda model: search(model, None), ("needs data",)),
}


@pytest.mark.parametrize("name", ASKED)
def test_random_numbers_serve_if_asked_for(name: str, model: Path) -> None:
    found = ASKED[name](model)
    if hasattr(found, "report"):
        assert found.report.calibration.is_random


@pytest.mark.parametrize("name", NOT_ASKED)
def test_missing_data_is_an_error_otherwise(name: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark.onnx.quantization.pipeline.optimize", lambda *_: pytest.fail("it began to work"))
    call, words = NOT_ASKED[name]
    refused(lambda: call(model), InvalidValueError, words)


def test_commands_want_data_or_random(tmp_path: Path, model: Path) -> None:
    out, made = tmp_path / "out.onnx", tmp_path / "made.onnx"
    quantize(model, GOOD).save(made)
    for arguments in (
        ["quantize", model, out],
        ["report", made, "--float", model, "-o", tmp_path / "page.html"],
        ["debug", model, made],
    ):
        command_refused(tmp_path, arguments, ("--calib", "--random"))
        both = run(*arguments, "--calib", tmp_path, "--random")
        assert (both.exit_code, "--calib or --random" in both.output) == (2, True)
        asked = run(*arguments, "--random")
        assert asked.exit_code == 0, asked.output
