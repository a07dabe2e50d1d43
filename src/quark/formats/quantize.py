"""Apply a format to an array: the quantized values, and the two neighbours that each could be rounded to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quark.errors import InvalidValueError
from quark.formats.affine import AffineParameters
from quark.formats.arrays import FLOAT64, array_kind, as_index, normalize_axis
from quark.formats.block import (
    BlockQuantizer,
    find_tensor_scale,
    lane_pieces,
    quantize_dequantize_blocks,
    quantize_lanes,
)
from quark.formats.catalog import get_format, parse_choice
from quark.formats.native import quantize_dequantize_native
from quark.formats.rounding import binade, quantize_dequantize_elements
from quark.formats.spec import BlockFormat, ElementFormat, Format, Grid, NonFinite, Rounding, ScaleRule

Array = NDArray[Any]
Pair = tuple[Array, Array]


def quantize_dequantize(
    x: Any,
    format: str | Format,
    axis: int = -1,
    *,
    block_size: int | None = None,
    scale_rule: str | ScaleRule = ScaleRule.FLOOR,
    rounding: str | Rounding = Rounding.HALF_EVEN,
    nonfinite: str | NonFinite | None = None,
    tensor_scale: float | None = None,
) -> Any:
    """Quantize x to a format and return the quantized values, as the same kind of array.

    x is a numpy array or a torch tensor (CPU or GPU) of float32, float16, bfloat16 or float64, and is not written to.
    Blocks run along `axis`. `nonfinite=None` is the format's own policy. `tensor_scale` is for formats that have one
    (nvfp4); None finds it from x. Values beyond the range saturate. float16 and
    bfloat16 are computed in float32 and rounded back, so a result beyond float16's range becomes Inf. No gradient flows
    through: use `quark.ops.fake_quantize` for training.

    >>> import numpy as np
    >>> quantize_dequantize(np.array([0.1, -0.7, 3.3, 6.1], np.float32), "mxfp4_e2m1")
    array([ 0. , -0.5,  3. ,  6. ], dtype=float32)
    """
    fmt = get_format(format)
    kind = array_kind(x)
    kind.precision(x)
    x = kind.detach(x)
    position = normalize_axis(axis, len(x.shape))
    if isinstance(fmt, BlockFormat):
        quantizer = choose_quantizer(
            fmt,
            block_size=block_size,
            scale_rule=scale_rule,
            rounding=rounding,
            nonfinite=nonfinite,
            tensor_scale=tensor_scale,
        )
        result = quantize_dequantize_native(x, position, quantizer)  # None if the compiled code does not support it
        return quantize_dequantize_blocks(kind, x, position, quantizer) if result is None else result
    refuse_block_options(fmt, block_size, tensor_scale, parse_choice(ScaleRule, scale_rule, "scale rule"))
    mode = parse_choice(Rounding, rounding, "rounding mode")
    return quantize_dequantize_elements(kind, x, fmt, mode, _policy(fmt, nonfinite))


def choose_quantizer(
    fmt: BlockFormat,
    *,
    block_size: int | None = None,
    scale_rule: str | ScaleRule = ScaleRule.FLOOR,
    rounding: str | Rounding = Rounding.HALF_EVEN,
    nonfinite: str | NonFinite | None = None,
    tensor_scale: float | None = None,
) -> BlockQuantizer:
    """A block format with the options of `quantize_dequantize`."""
    if block_size is not None:
        fmt = fmt.with_block_size(as_index("block_size", block_size))
    rule = parse_choice(ScaleRule, scale_rule, "scale rule")
    mode = parse_choice(Rounding, rounding, "rounding mode")
    return BlockQuantizer(fmt, rule, mode, _policy(fmt, nonfinite), tensor_scale)


def _policy(fmt: Format, nonfinite: str | NonFinite | None) -> NonFinite:
    if nonfinite is None:
        return fmt.default_nonfinite
    return parse_choice(NonFinite, nonfinite, "non-finite policy")


def refuse_block_options(fmt: ElementFormat, block_size: object, tensor_scale: object, rule: ScaleRule) -> None:
    """Raise an error for options that have no effect on a plain format, which has neither blocks nor a scale."""
    if block_size is not None:
        raise InvalidValueError(f"block_size: format '{fmt}' has no blocks; leave it out or choose a block format")
    if tensor_scale is not None:
        raise InvalidValueError(f"tensor_scale: format '{fmt}' has no blocks; leave it out or divide x by it first")
    if rule is not ScaleRule.FLOOR:
        raise InvalidValueError(f"scale_rule '{rule.value}': format '{fmt}' has no scale; leave it out")


# The neighbours below are the two numbers of a format that a value lies between, with the scales of rounding to
# nearest. If a value is a number of the format, or beyond its range, both neighbours are that number.


def affine_neighbours(x: Array, parameters: AffineParameters) -> Pair:
    """The neighbours of a float32 array among integer codes.

    >>> from quark.formats.affine import integer_format
    >>> parameters = AffineParameters(np.float32(0.5), np.int8(0), integer_format("int8"))
    >>> affine_neighbours(np.array([0.7, 1.0, 999.0], np.float32), parameters)
    (array([ 0.5,  1. , 63.5], dtype=float32), array([ 1. ,  1. , 63.5], dtype=float32))
    """
    kind, fmt = array_kind(x), parameters.format
    spread = parameters.granularity.spread
    scale = spread(kind, parameters.scale, x.shape)
    zero_point = spread(kind, parameters.zero_point, x.shape).astype(np.float64)
    steps = (x / scale).astype(np.float64)
    low, high = np.floor(steps), np.ceil(steps)
    lowest, highest = fmt.qmin - zero_point, fmt.qmax - zero_point
    lower, upper = (np.clip(codes, lowest, highest).astype(np.float32) for codes in (low, high))
    return (lower * scale).astype(np.float32), (upper * scale).astype(np.float32)


def element_neighbours(x: Array, fmt: ElementFormat) -> Pair:
    """The neighbours among the numbers of a plain format."""
    wide = np.asarray(x, np.float64)
    lower, upper = _on_grid(wide, fmt.grid, binade(array_kind(wide), wide, fmt.grid, FLOAT64), 1.0)
    return lower.astype(np.float32), upper.astype(np.float32)


def block_neighbours(x: Array, axis: int, quantizer: BlockQuantizer) -> Pair:
    """The neighbours of a float32 array with blocks along `axis`."""
    kind, fmt, grid = array_kind(x), quantizer.format, quantizer.format.element.grid
    lower, upper = np.empty_like(x), np.empty_like(x)
    tensor_scale = find_tensor_scale(kind, x, quantizer, kind.precision(x))
    for place, lanes in lane_pieces(kind, x, axis, fmt.block_size):
        quantized = quantize_lanes(kind, lanes, quantizer, kind.precision(lanes), tensor_scale)
        scales = quantized.scales.astype(np.float64)
        y = lanes.astype(np.float64) / np.where(scales == 0, 1, scales)  # at a scale of 0, every element becomes 0
        units: Any = 1.0
        if fmt.sub_blocks is not None:
            size = min(fmt.sub_blocks.size, len(lanes))
            spacing = units = np.repeat(quantized.units, size, axis=0)[: len(lanes)].astype(np.float64)
        elif quantized.units is not None:
            units = quantized.units.astype(np.float64)
            spacing = units * 2.0**grid.min_exponent
        else:
            spacing = binade(kind, y, grid, FLOAT64)
        pair = _on_grid(y, grid, spacing, units)
        if fmt.scale is not None and quantizer.scale_rule is ScaleRule.FLOOR:
            # with another largest element, a block would have another scale when it is quantized again
            sizes = np.abs(quantized.elements)
            is_largest = sizes == sizes.max(axis=0)
            pair = (
                np.where(is_largest, quantized.elements, pair[0]),
                np.where(is_largest, quantized.elements, pair[1]),
            )
        for out, elements in zip((lower, upper), pair, strict=True):
            place.store(out, (elements * scales).astype(np.float32))
    return lower, upper


def _on_grid(y: Array, grid: Grid, unit: Any, factor: Any) -> Pair:
    """y rounded down and up to multiples of unit * 2^-mantissa_bits, within the grid's limits times the factor."""
    quantum = unit * 2.0**-grid.mantissa_bits
    low = np.floor(y / quantum) * quantum
    high = np.where(low < y, low + quantum, low)
    lowest, highest = grid.lowest * factor, grid.highest * factor
    return np.clip(low, lowest, highest), np.clip(high, lowest, highest)
