"""How each number format is written in an ONNX file: asked of the code that inserts quantizers.

A domain says where it runs: the standard's and com.microsoft's operators are ONNX Runtime's own; those of com.amd.quark
run compiled where our library is registered, and as the functions in the file where it is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from quark.decide.specs import TensorSpec
from quark.errors import QuarkError
from quark.formats.catalog import get_format
from quark.onnx.insert.pairs import OPSET_OF_FLOAT8, InsertOptions, quantizer_behind
from quark.onnx.quantization.config.data_type import BLOCK_OPERATORS, DATA_TYPES, DataType
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.quant_types import QUANT_TYPES, format_of_type
from quark.onnx.quantization.presets import PRESETS
from quark.ops.schema import DOMAIN, quantizer_of
from quark.plan import EIGHT_BIT_FLOATS, AffineChoice, BlockChoice, Choice, FloatChoice
from quark.torch.quantization.config.config import QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.tensor_spec import MX_FORMATS
from quark.torch.quantization.config.type import Dtype

OPSETS = (13, 21)  # the oldest that is quantized, and the first with 4 and 16 bits in the standard
_FLOATS = ("float16", "bfloat16", *EIGHT_BIT_FLOATS)


@dataclass(frozen=True)
class FormatRow:
    """A format, the nodes that an activation is quantized by at each of OPSETS, the presets that have it for
    activations or weights, and how quark.torch names it (empty: it does not have it)."""

    name: str
    bits_per_element: float
    nodes: tuple[str, ...]
    presets: tuple[str, ...]
    torch_name: str

    @property
    def is_ours(self) -> bool:
        """That operators of our domain carry it out."""
        return any(node.startswith(DOMAIN) for node in self.nodes)


def format_rows() -> Iterator[FormatRow]:
    """One for each type that a spec or a field of quark.onnx can name."""
    presets, torch_names = _presets_by_format(), _torch_names()
    for name, choice in _choices().items():
        nodes = tuple(_nodes(choice, opset) for opset in OPSETS)
        bits = get_format(name).bits_per_element
        yield FormatRow(name, bits, nodes, tuple(presets.get(name, ())), torch_names.get(name, ""))


def _choices() -> Mapping[str, Choice]:
    choices = [_choice(data_type) for data_type in DATA_TYPES.values()]
    choices += [_plain_choice(name) for name in _types_of_fields()]
    return {choice.format: choice for choice in choices}


def _types_of_fields() -> Iterator[str]:
    """The plain formats that `activation_type` and `weight_type` can name; those without kernels are refused."""
    for member in (member for types in QUANT_TYPES for member in types):
        try:
            name = format_of_type(member)
        except QuarkError:  # the refusal is the answer
            continue
        if name not in BLOCK_OPERATORS:
            yield name


def _choice(data_type: DataType) -> Choice:
    if data_type.operator is None:
        return _plain_choice(data_type.format)
    quantizer, axis, _ = quantizer_of(data_type.operator, data_type.attributes)
    return BlockChoice(quantizer, axis)


def _plain_choice(name: str) -> Choice:
    return FloatChoice(name) if name in _FLOATS else AffineChoice(name, (1.0,), (0,))


def _nodes(choice: Choice, opset: int) -> str:
    """The operators behind an activation, each with its domain where that is not the standard's."""
    source, x = (_value(name) for name in ("source", "x"))
    if isinstance(choice, FloatChoice) and choice.is_eight_bits and opset < OPSET_OF_FLOAT8:
        return f"lifted to opset {OPSET_OF_FLOAT8}"
    producer = ir.Node("", "Relu", [source], outputs=[x], name="relu")
    graph = ir.Graph([source], [x], nodes=[producer], opset_imports={"": opset}, name="one")
    quantizer_behind(ir.Model(graph, ir_version=8), x, choice, InsertOptions())
    return ", ".join(f"{node.domain}.{node.op_type}".lstrip(".") for node in graph if node is not producer)


def _value(name: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2, 64]))


def _presets_by_format() -> Mapping[str, list[str]]:
    """Without those that finetune or mix, which have the formats of others."""
    presets: dict[str, list[str]] = {}
    for name, preset in PRESETS.items():
        if preset.is_trained or preset.fields.get("include_auto_mp"):
            continue
        default = settings_of(name).choose.default
        for fmt in {_format(default.activation), _format(default.weight)}:
            if fmt is not None:
                presets.setdefault(fmt, []).append(name)
    return presets


def _format(spec: TensorSpec | None) -> str | None:
    return None if spec is None else spec.format


def _torch_names() -> Mapping[str, str]:
    """A format's name to what a spec of quark.torch says for it; where only biases can have it, that as well."""
    names = {fmt: f"`Dtype.mx` of `Dtype.{element.name}`" for element, fmt in MX_FORMATS.items()}
    names |= {name: f"`Dtype.{name}`, per tensor or channel" for name in EIGHT_BIT_FLOATS}
    for dtype in Dtype:
        if dtype is Dtype.mx or dtype.value in names:
            continue
        places = [place for place in ("weight", "bias") if _is_taken(dtype, place)]
        if places:
            names[dtype.value] = f"`Dtype.{dtype.name}`" + ("" if "weight" in places else ", for biases")
    return names


def _is_taken(dtype: Dtype, place: str) -> bool:
    try:
        QuantizationConfig(**{place: QuantizationSpec(dtype)})
    except QuarkError:  # the refusal is the answer
        return False
    return True
