"""Number formats: their definitions, the catalog, and quantization of numpy and torch arrays.

    spec, catalog       a format as a value; the table of all formats
    quantize            the values that a format keeps, for plain and for block formats
    affine              integers with a scale and a zero point
    power_of_two        positions: scales that are powers of two
    packing             arrays in the bits that their format says

>>> import numpy as np
>>> get_format("mxfp4_e2m1").bits_per_element
4.25
>>> quantize_dequantize(np.array([0.1, -0.7, 3.3, 6.1], np.float32), "mxfp4_e2m1")
array([ 0. , -0.5,  3. ,  6. ], dtype=float32)
"""

from quark.formats.affine import (
    AffineParameters,
    choose_affine,
    dequantize_affine,
    find_ranges,
    quantize_affine,
    quantize_dequantize_affine,
)
from quark.formats.catalog import FORMATS, get_format
from quark.formats.packing import PackedArray, pack, unpack
from quark.formats.power_of_two import (
    NEAREST_SIGNED,
    NEAREST_UNSIGNED,
    NON_OVERFLOW,
    PositionRule,
    find_position,
    min_mse_position,
    non_overflow_position,
    position_of_range,
    scale_of_position,
)
from quark.formats.quantize import quantize_dequantize
from quark.formats.spec import (
    BlockFormat,
    FloatFormat,
    Format,
    IntFormat,
    NonFinite,
    Rounding,
    ScaleRule,
    Specials,
    SubBlocks,
)

__all__ = [
    "FORMATS",
    "NEAREST_SIGNED",
    "NEAREST_UNSIGNED",
    "NON_OVERFLOW",
    "AffineParameters",
    "BlockFormat",
    "FloatFormat",
    "Format",
    "IntFormat",
    "NonFinite",
    "PackedArray",
    "PositionRule",
    "Rounding",
    "ScaleRule",
    "Specials",
    "SubBlocks",
    "choose_affine",
    "dequantize_affine",
    "find_position",
    "find_ranges",
    "get_format",
    "min_mse_position",
    "non_overflow_position",
    "pack",
    "position_of_range",
    "quantize_affine",
    "quantize_dequantize",
    "quantize_dequantize_affine",
    "scale_of_position",
    "unpack",
]
