"""Throw random shapes, values, parameters and threads at the compiled quantizers to train through.

    python fuzz_fake_quantize.py [--seconds S] [--seed N] [--library FILE]

Values and gradients of x must be numpy's, NaN for NaN; the gradient of a parameter must agree with a sum in float64,
and be the same for every number of threads. `make test-sanitized` runs this on a build with AddressSanitizer and
UndefinedBehaviorSanitizer: arrays end where their memory does, so that reading on is seen.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_operators import random_values

from quark.formats import native
from quark.formats.native import (
    FakeKind,
    FakeQuantizer,
    NativeFakeQuantize,
    Rows,
    native_fake_quantize,
)

Array = np.ndarray[Any, Any]
Random = np.random.Generator

EXTENTS = [0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 100, 1023]
LONG = [16_383, 16_384, 16_385, 70_001]
TINY = np.finfo(np.float32).tiny


def random_rows(rng: Random) -> Rows:
    if rng.random() < 0.1:
        return Rows(1, int(rng.integers(1, 3)), int(rng.choice(LONG)))
    rows = Rows(*(int(rng.choice(EXTENTS[:limit])) for limit in (4, 8, 13)))
    return Rows(1, 1, rows.inner) if rng.random() < 0.3 else rows


def random_floats(rng: Random, shape: tuple[int, ...]) -> Array:
    """float32 up to the last of their memory."""
    return random_values(rng, shape).astype(np.float32)


def random_parameters(rng: Random, kind: FakeKind, channels: int) -> tuple[Array, Array]:
    """Parameters, some of them odd, and zero points."""
    if kind is FakeKind.THRESHOLD:
        parameter = rng.choice([rng.normal(0, 3), rng.normal(0, 200), np.inf, -np.inf, np.nan, 5.0], channels)
    elif kind is FakeKind.STEP:
        parameter = rng.choice([rng.random(), 0.25, 0.0, -1.0, 1e-45, 1e30, np.nan, np.inf], channels)
    else:
        parameter = rng.choice([rng.random() + 0.01, 0.5, 2.0**-126, 1e30, TINY], channels)
    return parameter.astype(np.float32), rng.integers(-8, 8, channels).astype(np.float32)


def steps_of(quantizer: FakeQuantizer, parameter: Array) -> Array:
    if quantizer.kind is FakeKind.THRESHOLD:
        exponent = np.clip(np.ceil(parameter) - quantizer.step_shift, -126, 126)
        return np.where(np.isnan(parameter), parameter, np.exp2(exponent)).astype(np.float32)
    return np.where(parameter < TINY, TINY, parameter) if quantizer.kind is FakeKind.STEP else parameter


def expected(
    quantizer: FakeQuantizer, x: Array, gradient: Array, parameter: Array, zero_point: Array
) -> tuple[Array, Array, Array]:
    """Values, the gradient of x, and the products that the gradient of the step is made of."""
    step = steps_of(quantizer, parameter)[:, None]
    low, high = (np.float32(code) - zero_point[:, None] for code in (quantizer.lowest, quantizer.highest))
    steps = x / step
    rounded, clipped = np.rint(steps), np.clip(steps, low, high)
    levels = np.rint(clipped)
    if quantizer.kind is FakeKind.AFFINE:
        levels = np.where(np.isnan(levels), np.float32(0), levels)
    is_inside = (rounded >= low) & (rounded <= high)
    if quantizer.kind is FakeKind.STEP:
        is_inside = (steps > low) & (steps < high)
    slope = np.where(is_inside, rounded - steps, clipped)
    slope = np.where(np.isnan(slope), 0, slope).astype(np.float64)
    return levels * step, np.where(is_inside, gradient, np.float32(0)), gradient.astype(np.float64) * slope


def compare(what: str, actual: Array, wanted: Array, quantizer: FakeQuantizer, rows: Rows) -> None:
    is_same = (actual == wanted) | (np.isnan(actual) & np.isnan(wanted))
    if not is_same.all():
        raise SystemExit(f"{what} of {quantizer} {rows}: {actual[~is_same][:3]}, not {wanted[~is_same][:3]}")


def compare_slopes(actual: Array, products: Array, factors: Array, quantizer: FakeQuantizer, rows: Rows) -> None:
    wanted = products.sum((0, 2)) * factors
    tolerance = 1e-6 * np.abs(products).sum((0, 2)) * np.abs(factors) + TINY
    is_near = (np.abs(actual - wanted) <= tolerance) | (np.isnan(actual) & np.isnan(wanted)) | (actual == wanted)
    is_near |= np.abs(wanted) > np.finfo(np.float32).max  # Inf, or near to it
    if not is_near.all():
        raise SystemExit(f"slopes of {quantizer} {rows}: {actual[~is_near][:3]}, not {wanted[~is_near][:3]}")


def fuzz(rng: Random, compiled: NativeFakeQuantize) -> None:
    bits = int(rng.integers(2, 22))
    lowest = -(1 << (bits - 1)) if rng.random() < 0.5 else 0
    kind = FakeKind(int(rng.integers(3)))
    quantizer = FakeQuantizer(kind, lowest, lowest + (1 << bits) - 1)
    rows = random_rows(rng)
    x, gradient = random_floats(rng, tuple(rows)), random_floats(rng, tuple(rows))
    parameter, zero_point = random_parameters(rng, kind, rows.channels)
    zero_point = zero_point if kind is FakeKind.AFFINE else np.zeros_like(zero_point)
    addresses = (parameter.ctypes.data, zero_point.ctypes.data if kind is FakeKind.AFFINE else 0)
    out, x_gradient = np.empty_like(x), np.empty_like(x)
    slopes = [np.empty(rows.channels, np.float32) for _ in range(2)]
    threads = int(rng.integers(1, 5))
    places = (x.ctypes.data, gradient.ctypes.data, x_gradient.ctypes.data)
    compiled.values(quantizer, rows, addresses, x.ctypes.data, out.ctypes.data, threads)
    for slope, count in zip(slopes, (1, threads), strict=True):
        compiled.gradients(quantizer, rows, addresses, places, slope.ctypes.data, count)
    values, gradients, products = expected(quantizer, x, gradient, parameter, zero_point)
    compare("values", out, values, quantizer, rows)
    compare("gradients", x_gradient, gradients, quantizer, rows)
    if kind is not FakeKind.AFFINE:
        factors = np.full(rows.channels, quantizer.slope_factor(rows.outer * rows.inner))
        if kind is FakeKind.THRESHOLD:
            factors = steps_of(quantizer, parameter).astype(np.float64) * math.log(2)
        compare_slopes(slopes[0], products, factors, quantizer, rows)
        compare("slopes by threads", slopes[1], slopes[0], quantizer, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", type=Path, help="the compiled library to test (default: the installed one)")
    arguments = parser.parse_args()
    if arguments.library is not None:
        native.library_file = lambda: arguments.library
    compiled = native_fake_quantize()
    if compiled is None:
        raise SystemExit(f"no compiled quantizers to train through in {native.library_file()}")
    rng = np.random.default_rng(arguments.seed)
    np.seterr(all="ignore")
    end = time.monotonic() + arguments.seconds
    count = 0
    while time.monotonic() < end:
        fuzz(rng, compiled)
        count += 1
    where = f"{native.library_file()}, {native.instruction_set()}"
    print(f"{where}: quantizers of {count} arrays, seed {arguments.seed}")


if __name__ == "__main__":
    main()
