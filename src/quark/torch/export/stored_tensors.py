"""One quantized parameter in the bits that its format says, and back.

    codes      integers of 8 bits and more, in their own type; scale and zero point beside them
    packed     integers of fewer bits, and blocks with their scales, as `quark.formats.packing` has them
    float      float16 and bfloat16 numbers; and any number that none of the others gives back exactly

A quantizer stands behind the parameter that is read back, too, and must give the same numbers again. Some block formats
do not: a block whose largest number was rounded up to the next power of two would get a larger scale. Its numbers are
handed over a little smaller, by less than rounding undoes. Where even that does not help, float numbers are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quark.errors import ModelError, QuarkError
from quark.formats.affine import code_dtype, dequantize_affine, quantize_affine
from quark.formats.arrays import array_kind
from quark.formats.packed_array import PackedArray
from quark.formats.packing import pack, unpack
from quark.formats.quantize import quantize_dequantize
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice
from quark.rounded import parameters_of, rounded

Array = NDArray[Any]
Tensors = dict[str, torch.Tensor]

_A_LITTLE_LESS = np.float32(1 - 2.0**-12)

SCALE, ZERO_POINT, BLOCK_SCALES = "scale", "zero_point", "block_scales"


@dataclass(frozen=True)
class Stored:
    """How a parameter is stored: `kind` is codes, packed or float; `parts` are the tensors beside the first one."""

    kind: str
    format: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "shape": list(self.shape), "parts": list(self.parts)}


def store(name: str, values: torch.Tensor, choice: Choice | None) -> tuple[Stored, Tensors]:
    """The tensors to write for a parameter, the first under its own name, and what they are."""
    dtype = str(values.dtype).removeprefix("torch.")
    plain = Stored("float", dtype, tuple(values.shape), dtype), {name: values.detach().cpu().contiguous()}
    if choice is None or values.dtype is not torch.float32:
        return plain
    array = np.ascontiguousarray(values.detach().cpu().numpy())
    made = _encode(name, array, choice)
    if made is None:
        return plain
    stored, tensors = made
    again = rounded(restore(name, stored, tensors, choice).numpy(), choice)
    is_exact = np.array_equal(again, rounded(array, choice), equal_nan=True)
    return (stored, tensors) if is_exact else plain


def restore(name: str, stored: Stored, tensors: Mapping[str, torch.Tensor], choice: Choice | None) -> torch.Tensor:
    """The numbers that were stored. A ModelError says which tensor is not as the file describes it."""
    if stored.kind == "float":
        return _expect(tensors, name, stored.shape).to(getattr(torch, stored.dtype))
    try:
        return torch.from_numpy(_decode(name, stored, tensors, choice)).reshape(stored.shape)
    except KeyError as error:
        raise ModelError(f"tensor '{name}' of the file has no part {error}") from error
    except QuarkError as error:
        raise ModelError(f"tensor '{name}' of the file: {error}") from error


def _encode(name: str, array: Array, choice: Choice) -> tuple[Stored, Tensors] | None:
    if isinstance(choice, AffineChoice):
        return _encode_affine(name, array, choice)
    if isinstance(choice, BlockChoice):
        packed = _packed_blocks(array, choice)
        tensors = {name: torch.from_numpy(packed.codes), f"{name}.{BLOCK_SCALES}": torch.from_numpy(packed.scales)}
        return Stored("packed", choice.format, array.shape, "float32", (BLOCK_SCALES,)), tensors
    if isinstance(choice, FloatChoice) and choice.scale == 1.0:
        small = torch.from_numpy(rounded(array, choice)).to(getattr(torch, choice.format))
        return Stored("float", choice.format, array.shape, "float32"), {name: small}
    return None


def _encode_affine(name: str, array: Array, choice: AffineChoice) -> tuple[Stored, Tensors]:
    parameters = parameters_of(choice, array.shape)
    codes = np.asarray(quantize_affine(array, parameters))
    scale, zero_point = np.asarray(parameters.scale), np.asarray(parameters.zero_point)
    beside = {f"{name}.{SCALE}": torch.from_numpy(scale.copy()), f"{name}.{ZERO_POINT}": torch.from_numpy(zero_point)}
    if parameters.format.bits < 8:
        packed = pack(codes.astype(np.float32), parameters.format)
        tensors = {name: torch.from_numpy(packed.codes), **beside}
        return Stored("packed", choice.format, array.shape, "float32", (SCALE, ZERO_POINT)), tensors
    return Stored("codes", choice.format, array.shape, "float32", (SCALE, ZERO_POINT)), {
        name: torch.from_numpy(codes),
        **beside,
    }


def _decode(name: str, stored: Stored, tensors: Mapping[str, torch.Tensor], choice: Choice | None) -> Array:
    if isinstance(choice, BlockChoice):
        scales = tensors[f"{name}.{BLOCK_SCALES}"].numpy()
        axis = choice.axis % len(stored.shape) if len(stored.shape) > 1 else 0
        packed = PackedArray(tensors[name].numpy(), scales, _own(choice, stored), stored.shape, axis, np.dtype("f4"))
        return _settled(np.asarray(unpack(packed)), choice, axis)
    if not isinstance(choice, AffineChoice):
        raise ModelError(f"it is stored as {stored.kind}, and the network has {choice} there")
    parameters = parameters_of(choice, stored.shape)
    codes = tensors[name].numpy()
    for part, expected in ((SCALE, parameters.scale), (ZERO_POINT, parameters.zero_point)):
        if not np.array_equal(tensors[f"{name}.{part}"].numpy(), expected):
            raise ModelError(f"its {part} is not that of the plan")
    if stored.kind == "packed":
        axis = max(len(stored.shape) - 1, 0)
        empty = np.zeros(0, np.uint8)
        numbers = unpack(PackedArray(codes, empty, parameters.format, stored.shape, axis, np.dtype("f4")))
        codes = np.asarray(numbers).astype(code_dtype(array_kind(codes), parameters.format))
    elif tuple(codes.shape) != stored.shape or codes.dtype != code_dtype(array_kind(codes), parameters.format):
        raise ModelError(f"{codes.dtype} codes of shape {tuple(codes.shape)}, expected {choice} of {stored.shape}")
    return np.asarray(dequantize_affine(codes, parameters))


def _settled(values: Array, choice: BlockChoice, axis: int) -> Array:
    """Numbers that the quantizer rounds to these values; see the text of the module."""
    is_moved = np.moveaxis(rounded(values, choice) != values, axis, -1)
    size = choice.quantizer.format.block_size
    if not is_moved.any():
        return values
    starts = np.arange(0, is_moved.shape[-1], size)
    blocks = np.repeat(np.logical_or.reduceat(is_moved, starts, -1), size, -1)[..., : is_moved.shape[-1]]
    smaller: Array = np.where(np.moveaxis(blocks, -1, axis), values * _A_LITTLE_LESS, values)
    return smaller


def _packed_blocks(array: Array, choice: BlockChoice) -> PackedArray:
    quantizer = choice.quantizer
    wide = quantize_dequantize(array, "bfloat16") if choice.to_bfloat16_first else array
    return pack(
        wide,
        quantizer.format,
        choice.axis if array.ndim > 1 else 0,
        scale_rule=quantizer.scale_rule,
        rounding=quantizer.rounding,
        nonfinite=quantizer.nonfinite,
    )


def _own(choice: BlockChoice, stored: Stored) -> Any:
    if choice.format != stored.format:
        raise ModelError(f"it is stored as {stored.format}, and the network has {choice.format} there")
    return choice.quantizer.format


def _expect(tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    found = tensors[name]
    if tuple(found.shape) != shape:
        raise ModelError(f"tensor '{name}' of the file has the shape {tuple(found.shape)}, expected {shape}")
    return found
