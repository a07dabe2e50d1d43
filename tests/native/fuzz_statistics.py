"""Throw random lengths, starts, values, bins, positions, planes at the compiled statistics; stop at the first surprise.

    python fuzz_statistics.py [--seconds S] [--seed N] [--library FILE]

Extremes and counts must be equal to numpy's. A sum of squared errors must agree to 1e-12 while every value is within
2^24 steps, which are exact in float32; beyond, the kernels for few bits round to 24 bits, and below 2^-126 steps they
lose bits that no sum notices. Sums over cells of planes agree to 1e-12 of their magnitudes. `make test-sanitized` runs
this on a build with AddressSanitizer and UndefinedBehaviorSanitizer: arrays end where their memory does, so that
reading on is seen.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_operators import between_elements, random_values

from quark.formats import native
from quark.ranges.statistics import AffineRounding, Lines, NativeStatistics, as_float32, native_statistics

Array = np.ndarray[Any, Any]
Random = np.random.Generator

WIDTHS = [2, 4, 8, 16, 32, 64, 512, 4096]  # of vectors, pairs of them, and blocks
BINS = [1, 2, 3, 7, 64, 255, 4096, 100_003]
EDGES = [0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 3.4e38, -3.4e38, 1e300, -1e300, np.inf, -np.inf, np.nan]
BITS = [2, 3, 4, 8, 15, 16, 17, 24, 31, 32]
MAX_POSITION = 300
POSITIONS = [0, 99, 100, 101, 127, 128, 149, MAX_POSITION]
REFUSED = [MAX_POSITION + 1, 1000, 2**30, 2**31 - 1, -MAX_POSITION - 1, -(2**30), -(2**31)]


def random_length(rng: Random) -> int:
    kind = rng.integers(10)
    if kind == 0:
        return int(rng.integers(0, 3))
    if kind == 1:
        return int(rng.integers(0, 100_000))
    return max(0, int(rng.choice(WIDTHS)) * int(rng.integers(1, 4)) + int(rng.integers(-3, 4)))


def random_array(rng: Random) -> Array:
    """Flat float32, from any element of its memory on and up to the last; rarely from between two elements."""
    length, skipped = random_length(rng), int(rng.integers(0, 17))
    x = random_values(rng, (length + skipped,)).astype(np.float32)
    if rng.random() < 0.7:
        x[~np.isfinite(x)] = rng.choice(np.array([0, 1, -1, 1e-45, 3.4e38], np.float32))
    if rng.random() < 0.1:
        x[:] = x[:1]
    x = x[skipped:]
    return as_float32(between_elements(x) if rng.random() < 0.1 else x)


def fuzz_extremes(rng: Random, compiled: NativeStatistics, x: Array) -> None:
    expected = (x.min(), x.max()) if x.size and np.isfinite(x).all() else None
    actual = compiled.extremes(x)
    if actual != expected:
        raise SystemExit(f"extremes of {x.size} elements {x[:3]}: {actual}, not {expected}")


def random_span(rng: Random, x: Array) -> tuple[float, float]:
    """Lowest and highest: of the data, of one of them, the wrong way round, or unrelated to them."""
    kind = rng.integers(5)
    if kind == 0 or not x.size:
        return float(rng.choice(EDGES)), float(rng.choice(EDGES))
    if kind == 1:
        return float(x[0]), float(x[0])
    if kind == 2:
        return float(x.max()), float(x.min())
    if kind == 3:
        return float(np.quantile(x, 0.3)), float(np.quantile(x, 0.9))
    return float(x.min()), float(x.max())


def fuzz_histogram(rng: Random, compiled: NativeStatistics, x: Array) -> None:
    """NaN, and what becomes NaN, belongs in no bin: then only the total is certain."""
    bins = int(rng.choice(BINS))
    lowest, highest = random_span(rng, x)
    per_unit = bins / (highest - lowest) if highest != lowest else float(rng.choice([0.0, np.inf, 1e300]))
    counts = rng.integers(-5, 2**40, bins)
    before = counts.copy()
    compiled.add_to_histogram(x, lowest, per_unit, counts)
    added = counts - before
    scaled = (x.astype(np.float64) - lowest) * per_unit
    if np.isnan(scaled).any():
        is_right = added.sum() == x.size and (added >= 0).all()
    else:
        is_right = np.array_equal(added, np.bincount(np.clip(scaled, 0, bins - 1).astype(np.int64), minlength=bins))
    if not is_right:
        raise SystemExit(f"{bins} bins of {lowest}..{highest}, {x.size} elements {x[:3]}: {added}")


def random_positions(rng: Random, x: Array, bits: int) -> tuple[int, ...]:
    """Any number of them: about where x fits the codes, and where nothing does."""
    count = int(rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 100]))
    if rng.random() < 0.3:
        return tuple(int(p) for p in rng.choice(POSITIONS, count) * rng.choice([-1, 1], count))
    largest = float(np.abs(x).max(initial=0.0))
    start = bits - int(np.frexp(largest)[1]) if 0 < largest < np.inf else 0
    return tuple(int(p) for p in np.clip(start + rng.integers(-4, 10, count), -MAX_POSITION, MAX_POSITION))


def expected_error(x: Array, bits: int, position: int) -> tuple[float, float]:
    """The sum of (x_hat - x)^2, and by how much another may differ."""
    steps = np.ldexp(x.astype(np.float64), position)
    half = 2.0 ** (bits - 1)
    error = np.ldexp(np.rint(np.clip(steps, -half, half - 1)) - steps, -position)
    total = float(np.square(error).sum())
    if bits > 16 or abs(position) > 100:
        return total, 1e-12 * total
    is_exact = np.abs(steps).max(initial=0.0) <= 2.0**24
    return total, (1e-12 if is_exact else 1e-6) * total + float(np.ldexp(x.size, -249 - 2 * position))


def fuzz_errors(rng: Random, compiled: NativeStatistics, x: Array) -> None:
    bits = int(rng.choice(BITS))
    positions = random_positions(rng, x, bits)
    sums = compiled.squared_errors(x, bits, positions)
    for position, actual in zip(positions, sums.tolist(), strict=True):
        expected, tolerance = expected_error(x, bits, position)
        is_right = abs(actual - expected) <= tolerance if np.isfinite(expected) else repr(actual) == repr(expected)
        if not is_right:
            raise SystemExit(f"{bits} bits at {position}, {x.size} elements {x[:3]}: {actual}, not {expected}")


def fuzz_refusals(rng: Random, compiled: NativeStatistics, x: Array) -> None:
    """One number out of range among good ones."""
    positions = [*random_positions(rng, x, 8), int(rng.choice(REFUSED))]
    rng.shuffle(positions)
    wrong_bits = int(rng.choice([-(2**31), -1, 0, 1, 33, 2**31 - 1]))
    for bits, where in ((8, tuple(positions)), (wrong_bits, (0, 1))):
        try:
            compiled.squared_errors(x, bits, where)
        except RuntimeError:
            continue
        raise SystemExit(f"not refused: {bits} bits at {where}")


def random_lines(rng: Random, count: int) -> Lines:
    """Groups in any order; some may be empty."""
    groups = int(rng.integers(1, min(count, int(rng.choice([1, 4, 1000]))) + 1))
    return Lines(rng.integers(0, groups, count).astype(np.int32), groups)


def random_rounding(rng: Random, x: Array) -> AffineRounding:
    """Bounds about zero or far from it; scales about where x fits them, and everywhere."""
    lowest, highest = np.sort(rng.choice([-(2.0**31), -32768, -128, -7, 0, 1, 127, 65535, 2.0**23 - 1, 2.0**31], 2))
    scale = float(np.exp2(rng.uniform(-148, 127)))
    if x.size and rng.random() < 0.7:
        scale = float(np.clip(np.abs(x[0]) / rng.uniform(0.4, 300), 1e-40, 1e38))
    if rng.random() < 0.3:
        scale = 2.0 ** np.floor(np.log2(scale)) if np.isfinite(scale) else 1.0
    return AffineRounding(scale if np.isfinite(scale) else 1.0, float(lowest), float(highest))


def compare_cells(planes: Array, rows: Lines, columns: Lines, actual: Array, what: str) -> None:
    cells = np.add.outer(rows.group_of * columns.count, columns.group_of).reshape(-1)
    for plane, found in zip(
        planes.astype(np.float64), actual.reshape(len(planes), rows.count * columns.count), strict=True
    ):
        expected, size = np.zeros(found.size), np.zeros(found.size)
        np.add.at(expected, cells, plane.reshape(-1))
        np.add.at(size, cells, np.abs(plane).reshape(-1))
        is_near = np.abs(found - expected) <= 1e-12 * size
        if not (is_near | (found == expected) | (np.isnan(found) & np.isnan(expected))).all():
            raise SystemExit(f"{what} of planes {planes.shape}: {found}, not {expected}")


def fuzz_planes(rng: Random, compiled: NativeStatistics, x: Array) -> None:
    x = x[: 1 << 12]
    height, width = (int(rng.integers(1, min(70, max(1, x.size)) + 1)) for _ in range(2))
    count = x.size // (height * width)
    planes = x[x.size - count * height * width :].reshape(count, height, width)  # to the end of the memory
    rows, columns = random_lines(rng, height), random_lines(rng, width)
    rounding = random_rounding(rng, x) if rng.random() < 0.8 else None
    sums, errors = compiled.plane_sums(planes, rows, columns, rounding)
    compare_cells(planes, rows, columns, sums, "sums")
    if rounding is not None:
        scale = np.float32(rounding.scale)
        kept = np.clip(np.rint(planes / scale), np.float32(rounding.lowest), np.float32(rounding.highest)) * scale
        compare_cells(kept - planes, rows, columns, errors, f"errors of {rounding}")
    bad = Lines(np.where(np.arange(width) == width // 2, rng.choice([-1, columns.count, 2**31 - 1]), 0), columns.count)
    try:
        compiled.plane_sums(planes, rows, Lines(bad.group_of.astype(np.int32), bad.count), rounding)
    except RuntimeError:
        return
    raise SystemExit(f"not refused: groups {bad.group_of} of {bad.count}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", type=Path, help="the compiled library to test (default: the installed one)")
    arguments = parser.parse_args()
    if arguments.library is not None:
        native.library_file = lambda: arguments.library
    compiled = native_statistics()
    if compiled is None:
        raise SystemExit(f"no compiled statistics in {native.library_file()}")
    rng = np.random.default_rng(arguments.seed)
    np.seterr(all="ignore")
    end = time.monotonic() + arguments.seconds
    arrays = 0
    while time.monotonic() < end:
        x = random_array(rng)
        for fuzz in (fuzz_extremes, fuzz_histogram, fuzz_errors, fuzz_refusals, fuzz_planes):
            fuzz(rng, compiled, x)
        arrays += 1
    print(f"{native.library_file()}, {native.instruction_set()}: statistics of {arrays} arrays, seed {arguments.seed}")


if __name__ == "__main__":
    main()
