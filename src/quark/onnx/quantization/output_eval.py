"""Distances and similarities of two arrays, at the import path that existing scripts use."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.compare.measures import absolute_error, pair_sums, psnr_of, similarity_of_moments, squared_sums

__all__ = ["calculate_cos", "calculate_l1_distance", "calculate_l2_distance", "calculate_psnr", "calculate_ssim"]

Array = NDArray[Any]

_LEAST = 1e-10
_PIXEL_PEAK = 255.0


def calculate_cos(x: Array, y: Array) -> Array:
    """The cosine of the angle between two arrays; NaN if one is zero."""
    cosine = pair_sums(x, y).cosine
    return np.array(math.nan if cosine is None else cosine)


def calculate_l2_distance(x: Array, y: Array) -> Array:
    """The square root of the sum of squared differences."""
    return np.array(math.sqrt(squared_sums(x, y)[0]))


def calculate_l1_distance(x: Array, y: Array) -> Array:
    """The sum of absolute differences."""
    return np.array(absolute_error(x, y))


def calculate_psnr(reference_image: Array, noisy_image: Array) -> Array:
    """The peak signal-to-noise ratio in dB; the peak is the largest number of the reference."""
    error = squared_sums(reference_image, noisy_image)[0] / max(reference_image.size, 1)
    peak = max(float(np.max(reference_image, initial=0.0)), _LEAST)
    return np.array(psnr_of(max(error, _LEAST) if error == 0 else error, peak))


def calculate_ssim(base_input: Array, ref_input: Array) -> Array:
    """The structural similarity of two arrays as a whole, for numbers from 0 to 255."""
    return np.array(similarity_of_moments(ref_input, base_input, _PIXEL_PEAK), np.float32)
