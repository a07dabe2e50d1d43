"""Weights of linear layers as tensors of a file, in two published layouts.

    QuarkLayout        names and packing of AMD Quark: codes under `weight`, `weight_scale`, `weight_zero_point`. Eight
                       codes of 4 bits make an int32; groups of integers are stored transposed, [inputs, outputs]
    AwqLayout          the same packing under AutoAWQ's names;  Fp8Layout   the same for FP8 of one scale
    CompressedLayout   compressed-tensors: `weight_packed` as one stream of bits for a row, in int32 words, with
                       `weight_shape`; 8-bit codes under `weight` where activations are quantized too

`tensors` encodes a QuantizedLinear, `weight` decodes what was stored, and `expected` says which tensors there are, of
which types and shapes, so that a file can be checked before anything in it is used. Blocks of MX formats are stored
with the finest scale at which the block's largest number still fits; all numbers on the block's grid are exact there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from quark.decide.specs import AffineSpec, BlockSpec, FloatSpec, TensorSpec
from quark.errors import ModelError, UnsupportedOptionError
from quark.formats.affine import AffineParameters, code_dtype, dequantize_affine
from quark.formats.arrays import array_kind
from quark.formats.packing import decode_elements, encode_elements, pack_bits, unpack_bits
from quark.formats.spec import SCALE_MIN_EXPONENT, BlockFormat, FloatFormat
from quark.torch.language.float8 import TORCH_TYPES, codes_of, values_of
from quark.torch.language.linear import QuantizedLinear, RoundedWeight, granularity

Array = NDArray[Any]
Tensors: TypeAlias = dict[str, torch.Tensor]
Shape: TypeAlias = tuple[int, ...]
Kinds: TypeAlias = dict[str, tuple[torch.dtype | None, Shape]]  # None: any type of floats

WEIGHT, PACKED, SCALE, ZERO_POINT, SHAPE = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
)
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the neighbours in nibbles 0, 1, ... of a word
_AWQ_NAMES = {WEIGHT: "qweight", SCALE: "scales", ZERO_POINT: "qzeros"}
_PLAIN_ORDER = tuple(range(8))
_LARGEST_CODE = 254  # the largest exponent of a block; 255 is NaN


class WeightLayout(ABC):
    """The stored layout of linear layers' weights."""

    name: str
    has_cache_scales = False  # the scales of keys and values are the attention layer's, not the projections'

    @abstractmethod
    def expected(self, spec: TensorSpec, shape: Shape, has_activations: bool) -> Kinds:
        """The types and shapes of a weight's tensors. Raises UnsupportedOptionError for what the layout does not have.
        `has_activations`: what the layer reads is quantized too."""

    @abstractmethod
    def tensors(self, linear: QuantizedLinear) -> Tensors:
        """The tensors of a rounded weight."""

    @abstractmethod
    def weight(self, spec: TensorSpec, shape: Shape, tensors: Mapping[str, torch.Tensor]) -> RoundedWeight:
        """The weight in float32 that tensors of the expected types and shapes stand for."""

    def refuse(self, what: str, remedy: str) -> UnsupportedOptionError:
        """An error for what the layout does not have."""
        return UnsupportedOptionError(f"{what}: files of {self.name} have no such weights; {remedy}")


# ---------------------------------------------------------------- Quark
@dataclass(frozen=True)
class QuarkLayout(WeightLayout):
    """AMD Quark's. `is_reordered`: the order of nibbles that AWQ kernels take. Without `has_codes`, weights are float
    numbers, with their scales beside them."""

    is_reordered: bool = True
    has_codes: bool = True
    name = "AMD Quark"

    def expected(self, spec: TensorSpec, shape: Shape, has_activations: bool) -> Kinds:
        outputs, inputs = shape
        if isinstance(spec, AffineSpec):
            return self._expected_integers(spec, shape)
        if isinstance(spec, FloatSpec) and spec.is_eight_bits:
            kinds: Kinds = {WEIGHT: (TORCH_TYPES[spec.format], shape)}
            kinds[SCALE] = torch.float32, ((outputs,) if spec.is_per_channel else ())
        else:
            fmt = _block_format(self, spec, shape)
            element = fmt.element
            kind = TORCH_TYPES.get(element.name, torch.uint8)
            width = inputs if kind is not torch.uint8 else inputs * element.bits // 8
            kinds = {WEIGHT: (kind, (outputs, width)), SCALE: (torch.uint8, (outputs, inputs // fmt.block_size))}
        return kinds if self.has_codes else {**kinds, WEIGHT: (None, shape)}

    def _expected_integers(self, spec: AffineSpec, shape: Shape) -> Kinds:
        outputs, inputs = shape
        if spec.integer.bits not in (4, 8):
            raise self.refuse(f"{spec.format} weights", "use 4 or 8 bits, or custom_mode='compressed-tensors'")
        parameters = _parameter_shape(self, spec, shape)
        if not self.has_codes:
            kinds: Kinds = {WEIGHT: (None, shape), SCALE: (torch.float32, parameters)}
            return {**kinds, ZERO_POINT: (torch.int32, parameters)}
        is_transposed = spec.group_size is not None
        codes = (inputs, outputs) if is_transposed else shape
        scale = parameters[::-1] if is_transposed else parameters
        kind = torch.int32 if spec.integer.bits == 4 else getattr(torch, spec.format)
        kinds = {}
        for name, whole in ((WEIGHT, codes), (ZERO_POINT, scale)):
            if spec.integer.bits == 4 and whole and whole[-1] % 8:
                raise self.refuse(
                    f"{spec.format} weights [{outputs}, {inputs}]",
                    "eight codes make a word there, and the size has to be a multiple of 8; exclude the layer, or use "
                    "custom_mode='compressed-tensors'",
                )
            kinds[name] = kind, ((*whole[:-1], whole[-1] // 8) if spec.integer.bits == 4 and whole else whole)
        kinds[SCALE] = torch.float32, scale
        return kinds

    def tensors(self, linear: QuantizedLinear) -> Tensors:
        spec, weight = linear.spec, linear.weight.detach().cpu()
        assert spec is not None
        if isinstance(spec, AffineSpec):
            made = self._integer_tensors(linear, spec)
        elif isinstance(spec, FloatSpec):
            assert linear.weight_scale is not None
            scale = linear.weight_scale.cpu()
            made = {WEIGHT: codes_of(weight, scale, spec.format), SCALE: scale.reshape(-1 if scale.dim() else ())}
        else:
            codes, scales = _block_codes(_block_format(self, spec, tuple(weight.shape)), weight)
            made = {WEIGHT: codes, SCALE: scales}
        return made if self.has_codes else {**made, WEIGHT: weight}

    def _integer_tensors(self, linear: QuantizedLinear, spec: AffineSpec) -> Tensors:
        parameters = linear.parameters_of_weight()
        assert parameters is not None
        scale, zero_point = np.asarray(parameters.scale), np.asarray(parameters.zero_point)
        if not self.has_codes:
            return {SCALE: torch.from_numpy(scale.copy()), ZERO_POINT: torch.from_numpy(zero_point.astype(np.int32))}
        codes = np.asarray(linear.codes())
        if spec.group_size is not None:
            codes, scale, zero_point = codes.T, scale.T, zero_point.T
        made = {SCALE: torch.from_numpy(np.array(scale, order="C"))}
        for name, array in ((WEIGHT, codes), (ZERO_POINT, zero_point)):
            if spec.integer.bits == 4 and array.ndim:
                made[name] = torch.from_numpy(self._words(array))
            else:
                kind = np.int32 if spec.integer.bits == 4 else np.dtype(spec.format)
                made[name] = torch.from_numpy(np.array(array, kind, order="C"))
        return made

    def weight(self, spec: TensorSpec, shape: Shape, tensors: Mapping[str, torch.Tensor]) -> RoundedWeight:
        stored = tensors[WEIGHT]
        if isinstance(spec, FloatSpec):
            scale = tensors[SCALE].float()
            wide = scale[:, None] if scale.dim() else scale
            return RoundedWeight(values_of(stored, wide) if self.has_codes else stored, scale=wide)
        if isinstance(spec, AffineSpec):
            return self._integer_weight(spec, tensors)
        if not self.has_codes:
            return RoundedWeight(stored)
        return RoundedWeight(_block_values(_block_format(self, spec, shape), shape, stored, tensors[SCALE]))

    def _integer_weight(self, spec: AffineSpec, tensors: Mapping[str, torch.Tensor]) -> RoundedWeight:
        scale, zero_point = tensors[SCALE].float().numpy(), tensors[ZERO_POINT].numpy()
        if not self.has_codes:
            return RoundedWeight(tensors[WEIGHT], _parameters(spec, scale, zero_point))
        codes = tensors[WEIGHT].numpy()
        if spec.integer.bits == 4:
            codes = self._nibbles(codes, spec)
            zero_point = self._nibbles(zero_point, spec) if zero_point.ndim else zero_point
        if spec.group_size is not None:
            codes, scale, zero_point = codes.T, scale.T, zero_point.T
        return _dequantized(_parameters(spec, scale, zero_point), codes)

    @property
    def _order(self) -> tuple[int, ...]:
        return _AWQ_ORDER if self.is_reordered else _PLAIN_ORDER

    def _words(self, codes: Array) -> Array:
        """Eight 4-bit codes of the last axis in each int32."""
        nibbles = (codes.astype(np.int64) & 15).astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)[..., self._order]
        words = np.zeros(nibbles.shape[:-1], np.uint32)
        for place in range(8):
            words |= nibbles[..., place] << np.uint32(4 * place)
        return words.view(np.int32)

    def _nibbles(self, words: Array, spec: AffineSpec) -> Array:
        nibbles = (words.view(np.uint32)[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & np.uint32(15)
        plain = np.empty_like(nibbles)
        plain[..., self._order] = nibbles
        codes: Array = plain.reshape(*words.shape[:-1], -1).astype(np.int8)
        return np.where(codes > 7, codes - 16, codes).astype(np.int8) if spec.integer.signed else codes


@dataclass(frozen=True)
class AwqLayout(QuarkLayout):
    """The same packing under the names of AutoAWQ, for uint4 in groups."""

    name = "AutoAWQ"

    def expected(self, spec: TensorSpec, shape: Shape, has_activations: bool) -> Kinds:
        if not isinstance(spec, AffineSpec) or spec.format != "uint4" or spec.group_size is None or has_activations:
            raise self.refuse(
                f"{spec.format} weights", "use uint4 in groups without activations, or custom_mode='quark'"
            )
        return {_AWQ_NAMES[name]: kind for name, kind in super().expected(spec, shape, has_activations).items()}

    def tensors(self, linear: QuantizedLinear) -> Tensors:
        return {_AWQ_NAMES[name]: value for name, value in super().tensors(linear).items()}

    def weight(self, spec: TensorSpec, shape: Shape, tensors: Mapping[str, torch.Tensor]) -> RoundedWeight:
        return super().weight(spec, shape, {name: tensors[stored_name] for name, stored_name in _AWQ_NAMES.items()})


@dataclass(frozen=True)
class Fp8Layout(QuarkLayout):
    """The same names for FP8 E4M3 with one scale for a tensor, and scales of the cache beside the attention layer."""

    name = "vLLM's FP8"
    has_cache_scales = True

    def expected(self, spec: TensorSpec, shape: Shape, has_activations: bool) -> Kinds:
        if not isinstance(spec, FloatSpec) or spec.format != "fp8_e4m3" or spec.is_per_channel:
            raise self.refuse(f"{spec.format} weights", "use FP8E4M3PerTensorSpec, or custom_mode='quark'")
        return super().expected(spec, shape, has_activations)


# ---------------------------------------------------------------- compressed-tensors
@dataclass(frozen=True)
class CompressedLayout(WeightLayout):
    """The layout of compressed-tensors. Codes are signed there, so those of unsigned types are moved by half their
    range."""

    name = "compressed-tensors"
    has_cache_scales = True

    def expected(self, spec: TensorSpec, shape: Shape, has_activations: bool) -> Kinds:
        outputs, inputs = shape
        if isinstance(spec, AffineSpec):
            return self._expected_integers(spec, shape, has_activations)
        if isinstance(spec, FloatSpec) and spec.format == "fp8_e4m3":
            scale = (outputs, 1) if spec.is_per_channel else (1,)
            return {WEIGHT: (torch.float8_e4m3fn, shape), SCALE: (torch.float32, scale)}
        fmt = _block_format(self, spec, shape)
        if fmt.name not in ("mxfp4_e2m1", "mxfp8_e4m3") or fmt.block_size != 32:
            raise self.refuse(f"{fmt} weights", "use MXFP4 or MXFP8 (E4M3) in blocks of 32, or custom_mode='quark'")
        scales: Kinds = {SCALE: (torch.uint8, (outputs, inputs // fmt.block_size))}
        if fmt.name == "mxfp8_e4m3":
            return {WEIGHT: (torch.float8_e4m3fn, shape), **scales}
        return {PACKED: (torch.uint8, (outputs, inputs // 2)), **scales}

    def _expected_integers(self, spec: AffineSpec, shape: Shape, has_activations: bool) -> Kinds:
        outputs, inputs = shape
        bits = spec.integer.bits
        if bits > 8:
            raise self.refuse(f"{spec.format} weights", "use at most 8 bits")
        scale = self._spread(spec, _parameter_shape(self, spec, shape))
        kinds: Kinds = {SCALE: (torch.float32, scale)}
        if is_stored_whole(spec, has_activations):
            kinds[WEIGHT] = torch.int8, shape
        else:
            kinds[PACKED] = torch.int32, (outputs, -(-inputs * bits // 32))
            kinds[SHAPE] = torch.int64, (2,)
        if spec.is_symmetric:
            return kinds
        if is_stored_whole(spec, has_activations) or spec.has_one_scale:
            kinds[ZERO_POINT] = torch.int8, scale
        else:
            kinds[ZERO_POINT] = torch.int32, (-(-outputs * bits // 32), scale[1])
        return kinds

    @staticmethod
    def _spread(spec: AffineSpec, shape: Shape) -> Shape:
        if spec.has_one_scale:
            return (1,)
        return shape if spec.group_size is not None else (*shape, 1)

    def tensors(self, linear: QuantizedLinear) -> Tensors:
        spec, weight = linear.spec, linear.weight.detach().cpu()
        if isinstance(spec, AffineSpec):
            return self._integer_tensors(linear, spec)
        if isinstance(spec, FloatSpec):
            assert linear.weight_scale is not None
            scale = linear.weight_scale.cpu()
            return {WEIGHT: codes_of(weight, scale, spec.format), SCALE: scale if scale.dim() else scale.reshape(1)}
        assert spec is not None
        fmt = _block_format(self, spec, tuple(weight.shape))
        codes, scales = _block_codes(fmt, weight)
        return {PACKED if codes.dtype is torch.uint8 else WEIGHT: codes, SCALE: scales}

    def _integer_tensors(self, linear: QuantizedLinear, spec: AffineSpec) -> Tensors:
        parameters = linear.parameters_of_weight()
        assert parameters is not None
        bits, shift = spec.integer.bits, 0 if spec.integer.signed else 1 << (spec.integer.bits - 1)
        codes = np.asarray(linear.codes()).astype(np.int16) - shift
        scale = np.asarray(parameters.scale)
        shape = self._spread(spec, scale.shape)
        zero_point = (np.asarray(parameters.zero_point).astype(np.int16) - shift).reshape(shape)
        if spec.is_symmetric and zero_point.any():
            raise ModelError("symmetric weights with zero points other than the middle code: quantize the model again")
        made = {SCALE: torch.from_numpy(scale.reshape(shape).copy())}
        is_whole = is_stored_whole(spec, linear.input_quantizer is not None)
        if is_whole:
            made[WEIGHT] = torch.from_numpy(codes.astype(np.int8))
        else:
            made[PACKED] = torch.from_numpy(_stream(codes, bits))
            made[SHAPE] = torch.tensor(codes.shape)
        if not spec.is_symmetric:
            is_packed = not is_whole and not spec.has_one_scale
            stored = _stream(zero_point.T, bits).T if is_packed else zero_point.astype(np.int8)
            made[ZERO_POINT] = torch.from_numpy(np.ascontiguousarray(stored))
        return made

    def weight(self, spec: TensorSpec, shape: Shape, tensors: Mapping[str, torch.Tensor]) -> RoundedWeight:
        if isinstance(spec, FloatSpec):
            scale = tensors[SCALE].float()
            wide = scale if spec.is_per_channel else scale.reshape(())
            return RoundedWeight(values_of(tensors[WEIGHT], wide), scale=wide)
        if isinstance(spec, AffineSpec):
            return self._integer_weight(spec, shape, tensors)
        stored = tensors[PACKED] if PACKED in tensors else tensors[WEIGHT]
        return RoundedWeight(_block_values(_block_format(self, spec, shape), shape, stored, tensors[SCALE]))

    def _integer_weight(self, spec: AffineSpec, shape: Shape, tensors: Mapping[str, torch.Tensor]) -> RoundedWeight:
        bits, scale = spec.integer.bits, tensors[SCALE].float().numpy()
        if SHAPE in tensors and tuple(tensors[SHAPE].tolist()) != shape:
            raise ModelError(f"{SHAPE} is {tuple(tensors[SHAPE].tolist())}, expected {shape}")
        is_packed = PACKED in tensors
        codes = _from_stream(tensors[PACKED].numpy(), bits, shape[1]) if is_packed else tensors[WEIGHT].numpy()
        zero_point = np.zeros(scale.shape, np.int8)
        if ZERO_POINT in tensors:
            stored = tensors[ZERO_POINT].numpy()
            zero_point = _from_stream(stored.T, bits, shape[0]).T if stored.dtype == np.int32 else stored
        shift = 0 if spec.integer.signed else 1 << (bits - 1)
        narrow = np.dtype(np.int8 if spec.integer.signed else np.uint8)
        codes, zero_point = ((array.astype(np.int16) + shift).astype(narrow) for array in (codes, zero_point))
        whole = _parameter_shape(self, spec, shape)
        return _dequantized(_parameters(spec, scale.reshape(whole), zero_point.reshape(whole)), codes)


def is_stored_whole(spec: AffineSpec, has_activations: bool) -> bool:
    """True if codes are stored as they are in compressed-tensors, not packed."""
    return spec.integer.bits == 8 and has_activations


# ---------------------------------------------------------------- both
def _parameter_shape(layout: WeightLayout, spec: AffineSpec, shape: Shape) -> Shape:
    """The shape of scales: (), (outputs,) or (outputs, groups)."""
    outputs, inputs = shape
    axis, group_size = granularity(spec)
    if group_size is not None:
        if inputs % group_size:
            raise layout.refuse(
                f"{spec.format} weights in groups of {group_size} along {inputs} inputs",
                "the last group would be a short one; use a size that divides the inputs, or exclude the layer",
            )
        return (outputs, inputs // group_size)
    if axis == 1:
        raise layout.refuse(f"{spec.format} weights with a scale for each input", "use ch_axis=0")
    return () if axis is None else (outputs,)


def _parameters(spec: AffineSpec, scale: Array, zero_point: Array) -> AffineParameters:
    fmt = spec.integer
    axis, group_size = granularity(spec)
    scale = np.array(scale, np.float32, order="C")
    if not np.isfinite(scale).all() or not scale.all():
        raise ModelError("a scale is zero or not finite")
    whole = np.asarray(zero_point).astype(np.int64)
    if whole.size and not (fmt.qmin <= whole.min() and whole.max() <= fmt.qmax):
        raise ModelError(f"a zero point is no {fmt.name}")
    return AffineParameters(scale, whole.astype(code_dtype(array_kind(scale), fmt)), fmt, axis, group_size)


def _dequantized(parameters: AffineParameters, codes: Array) -> RoundedWeight:
    fmt = parameters.format
    if codes.size and not (fmt.qmin <= codes.min() and codes.max() <= fmt.qmax):
        raise ModelError(f"a code is no {fmt.name}")
    kind = code_dtype(array_kind(codes), fmt)
    values = dequantize_affine(np.ascontiguousarray(codes).astype(kind), parameters)
    return RoundedWeight(torch.from_numpy(np.asarray(values)), parameters)


def _stream(codes: Array, bits: int) -> Array:
    """Signed codes of each row as one stream of bits in int32 words, moved up so that the lowest is 0."""
    raised = (codes + (1 << (bits - 1))).astype(np.uint8)
    packed = pack_bits(np.ascontiguousarray(raised), bits)
    words = -(-codes.shape[1] * bits // 32)
    whole = np.zeros((len(packed), 4 * words), np.uint8)
    whole[:, : packed.shape[1]] = packed
    return whole.view("<i4").astype(np.int32)


def _from_stream(words: Array, bits: int, count: int) -> Array:
    whole = np.ascontiguousarray(words).astype("<i4").view(np.uint8)[:, : -(-count * bits // 8)]
    return unpack_bits(np.ascontiguousarray(whole), bits, count).astype(np.int16) - (1 << (bits - 1))


def _block_format(layout: WeightLayout, spec: TensorSpec, shape: Shape) -> BlockFormat:
    if not isinstance(spec, BlockSpec) or not isinstance(spec.quantizer.format.element, FloatFormat):
        kind = spec.format if not isinstance(spec, BlockSpec) else str(spec.quantizer.format)
        raise layout.refuse(
            f"{kind} weights", "use integers, FP8 or an MX type of floats, or save with save_pretrained"
        )
    fmt = spec.quantizer.format
    if fmt.sub_blocks is not None or shape[1] % fmt.block_size or shape[1] * fmt.element.bits % 8:
        raise layout.refuse(
            f"{fmt} weights with {shape[1]} inputs", f"the inputs have to be a multiple of {fmt.block_size}"
        )
    return fmt


def _block_codes(fmt: BlockFormat, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and exponents of weights that lie on the grid of the format."""
    element = fmt.element
    assert isinstance(element, FloatFormat)
    values = np.ascontiguousarray(weight.float().numpy())
    blocks = values.reshape(len(values), -1, fmt.block_size)
    highest = np.abs(blocks).max(-1, keepdims=True)
    # the smallest exponent at which the largest number of the block fits; frexp has no rounding at all
    fraction, exponent = np.frexp(highest)
    top, top_exponent = math.frexp(float(element.max))
    exponents = np.where(highest > 0, exponent - top_exponent + (fraction > top), 0)
    exponents = np.clip(exponents, SCALE_MIN_EXPONENT, _LARGEST_CODE + SCALE_MIN_EXPONENT)
    numbers = np.ldexp(blocks, -exponents).astype(np.float32).reshape(values.shape)
    scales = torch.from_numpy((exponents[..., 0] - SCALE_MIN_EXPONENT).astype(np.uint8))
    codes = torch.from_numpy(pack_bits(encode_elements(element, numbers), element.bits))
    kind = TORCH_TYPES.get(element.name)
    return (codes if kind is None else codes.view(kind)), scales


def _block_values(fmt: BlockFormat, shape: Shape, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if bool((scales > _LARGEST_CODE).any()):
        raise ModelError("the scale of a block is NaN")
    packed = codes.view(torch.uint8).numpy()
    elements = decode_elements(fmt.element, unpack_bits(packed, fmt.element.bits, shape[1]), np.dtype(np.float32))
    exponents = scales.numpy().astype(np.int32) + SCALE_MIN_EXPONENT
    blocks = np.asarray(elements).reshape(shape[0], -1, fmt.block_size)
    return torch.from_numpy(np.ldexp(blocks, exponents[..., None]).astype(np.float32).reshape(shape))
