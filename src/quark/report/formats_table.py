"""What each number format costs and what it keeps: one row per format.

    SQNR = 10 log10( sum w^2 / sum (w - quantized w)^2 )     over all values of all weight tensors

Block formats find their own scales. Plain integers, and floats of 8 bits or fewer, are nothing without a scale: each
tensor gets the one that takes its largest magnitude to the format's largest number, the zero point of an unsigned
integer being in the middle of its codes. float16 and bfloat16 are casts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quark.formats import (
    FORMATS,
    AffineParameters,
    BlockFormat,
    FloatFormat,
    Format,
    IntFormat,
    choose_affine,
    find_ranges,
    quantize_dequantize,
    quantize_dequantize_affine,
)
from quark.report.weights import Matrix

if TYPE_CHECKING:
    from quark.report.console import Table

# The widths that hardware has; --all shows the others.
COMMON_INTEGERS = ("int4", "int8", "int16", "uint8")

CAPTION = (
    "SQNR: signal to quantization noise over {values:,} weights in {tensors} tensors of {source}. "
    "Blocks run along the axis that a dot product sums over. "
    "2^e: a power of two for each block; 2^(e-d): and a finer one for each sub-block. "
    "max-abs: each tensor is scaled so that its largest magnitude meets the format's largest number; "
    "offset: zero point at mid-range; cast: no scale."
)


@dataclass(frozen=True)
class FormatRow:
    """One format: `sqnr_db` is inf where no weight changed, and -inf where a value left the range of float32."""

    name: str
    bits_per_element: float
    block_size: int | None
    max: float
    smallest_step: float
    scale: str
    sqnr_db: float

    def to_json(self) -> dict[str, object]:
        """The row as JSON can hold it: an infinite SQNR is null, and `note` says which."""
        row = asdict(self)
        if math.isinf(self.sqnr_db):
            row |= {"sqnr_db": None, "note": self.sqnr_text}
        return row

    @property
    def sqnr_text(self) -> str:
        if math.isinf(self.sqnr_db):
            return "exact" if self.sqnr_db > 0 else "overflow"
        return f"{self.sqnr_db:.2f}"


def chosen_formats(all_widths: bool) -> list[Format]:
    """Every format of the catalog; of the plain integers only the common widths unless all are asked for."""
    return [
        fmt for name, fmt in FORMATS.items() if all_widths or not isinstance(fmt, IntFormat) or name in COMMON_INTEGERS
    ]


def format_rows(formats: Iterable[Format], weights: Mapping[str, Matrix]) -> list[FormatRow]:
    """A row for each format, in the order given."""
    return [
        FormatRow(
            name=str(fmt),
            bits_per_element=fmt.bits_per_element,
            block_size=fmt.block_size if isinstance(fmt, BlockFormat) else None,
            max=fmt.max,
            smallest_step=fmt.min_subnormal,
            scale=_scale_text(fmt),
            sqnr_db=sqnr_db(fmt, weights.values()),
        )
        for fmt in formats
    ]


def sqnr_db(fmt: Format, weights: Iterable[Matrix]) -> float:
    """Signal to quantization noise of all the weights together; they must not all be zero."""
    signal, noise = 0.0, 0.0
    for matrix in weights:
        exact = matrix.astype(np.float64)
        error = _quantized(fmt, matrix).astype(np.float64) - exact
        signal += float(np.vdot(exact, exact))
        noise += float(np.vdot(error, error))
    return 10 * math.log10(signal / noise) if 0 < noise < math.inf else math.copysign(math.inf, -noise or 1)


def _quantized(fmt: Format, matrix: Matrix) -> NDArray[np.floating]:
    """The matrix in the format, by the rules that the module's docstring gives."""
    result: NDArray[np.floating]
    if not _needs_scale(fmt):
        result = quantize_dequantize(matrix, fmt, axis=-1)
        return result
    exact = matrix.astype(np.float64)
    if isinstance(fmt, IntFormat):
        scale, zero_point = choose_affine(*find_ranges(exact), fmt, symmetric=True)
        result = quantize_dequantize_affine(exact, AffineParameters(scale, zero_point, fmt))
    else:
        scale = float(np.abs(exact).max()) / fmt.max or 1.0
        result = quantize_dequantize(exact / scale, fmt) * scale
    return result


def _needs_scale(fmt: Format) -> bool:
    return isinstance(fmt, IntFormat) or (isinstance(fmt, FloatFormat) and fmt.bits <= 8)


def _scale_text(fmt: Format) -> str:
    if isinstance(fmt, BlockFormat):
        return "2^e" if fmt.sub_blocks is None else "2^(e-d)"
    if isinstance(fmt, IntFormat) and not fmt.signed:
        return "max-abs offset"
    return "max-abs" if _needs_scale(fmt) else "cast"


def rich_table(rows: Iterable[FormatRow], weights: Mapping[str, Matrix], source: str) -> Table:
    """The rows for reading. ASCII only, so that any terminal can show it."""
    from quark.report.console import Table, cell

    values = sum(matrix.size for matrix in weights.values())
    caption = CAPTION.format(values=values, tensors=len(weights), source=source)
    table = Table(title="Number formats", caption=cell(caption), caption_justify="left")
    table.add_column("format", no_wrap=True)
    for heading in ("bits", "block", "max", "min step"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("scale", overflow="fold")
    table.add_column("SQNR dB", justify="right", overflow="fold")
    for row in rows:
        block = "" if row.block_size is None else str(row.block_size)
        # 32767 and 65504 in full, 9.757e+42 in short
        limits = (f"{row.max:.{6 if row.max < 1e6 else 4}g}", f"{row.smallest_step:.4g}")
        table.add_row(row.name, f"{row.bits_per_element:g}", block, *limits, row.scale, row.sqnr_text)
    return table
