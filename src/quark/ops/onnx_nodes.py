"""A format as an ONNX node: the quantizer's choices written down as attributes, and read back.

Every attribute that existing runtimes know is written, whether or not it has its default; `scale_rule` and `nonfinite`
only where they differ from what absence means, so that a plain file stays as plain as others make it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
from onnx import helper

from quark.errors import InvalidValueError
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import MX_ELEMENTS
from quark.formats.spec import BlockFormat, IntFormat, NonFinite, ScaleRule
from quark.ops.schema import (
    BFP_QUANTIZE_DEQUANTIZE,
    BIT_WIDTH_OVERHEAD,
    DOMAIN,
    EXTENDED_DEQUANTIZE_LINEAR,
    EXTENDED_QUANTIZE_LINEAR,
    MX_QUANTIZE_DEQUANTIZE,
    OPERATORS,
    ROUNDING_MODES,
    TO_BFP,
    TO_BFP_PRIME,
    AttributeValue,
    quantizer_of,
)


def make_block_node(
    quantizer: BlockQuantizer,
    axis: int,
    input: str,
    output: str,
    name: str = "",
    *,
    convert_to_bfloat: bool = False,
) -> onnx.NodeProto:
    """The node that quantizes and dequantizes `input` along `axis`. A format that neither operator can express is an
    error that says what stands in the way. `convert_to_bfloat` rounds to bfloat16 first, which only block float and
    microexponents can."""
    op_type, attributes = block_attributes(quantizer, axis, convert_to_bfloat)
    node = helper.make_node(op_type, [input], [output], name, domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    return node


def make_extended_quantize_node(
    input: str, scale: str, zero_point: str, output: str, axis: int = 0, name: str = ""
) -> onnx.NodeProto:
    """x / scale + zero_point, rounded and saturating in the zero point's type."""
    return _extended_node(EXTENDED_QUANTIZE_LINEAR.name, [input, scale, zero_point], output, axis, name)


def make_extended_dequantize_node(
    input: str, scale: str, zero_point: str, output: str, axis: int = 0, name: str = ""
) -> onnx.NodeProto:
    """(x - zero_point) * scale in the type of the scale."""
    return _extended_node(EXTENDED_DEQUANTIZE_LINEAR.name, [input, scale, zero_point], output, axis, name)


def _extended_node(op_type: str, inputs: list[str], output: str, axis: int, name: str) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, [output], name, domain=DOMAIN, axis=axis)


def block_attributes(
    quantizer: BlockQuantizer, axis: int, convert_to_bfloat: bool = False
) -> tuple[str, dict[str, AttributeValue]]:
    """The operator and the attributes for which `quantizer_of` gives this quantizer back."""
    fmt = quantizer.format
    is_mx = _is_mx(fmt)
    if is_mx and convert_to_bfloat:
        raise InvalidValueError(
            f"convert_to_bfloat: {MX_QUANTIZE_DEQUANTIZE.name} (format '{fmt}') does not round to bfloat16 first; "
            f"leave it out, or insert a Cast"
        )
    op_type = MX_QUANTIZE_DEQUANTIZE.name if is_mx else BFP_QUANTIZE_DEQUANTIZE.name
    attributes: dict[str, AttributeValue] = {"element_dtype": str(fmt.element)} if is_mx else _bfp_attributes(fmt)
    attributes |= {
        "axis": axis,
        "block_size": fmt.block_size,
        "rounding_mode": ROUNDING_MODES.index(quantizer.rounding),
    }
    if not is_mx:
        attributes["convert_to_bfloat_before_bfp"] = int(convert_to_bfloat)
    plain = quantizer_of(op_type, attributes)[0]
    if quantizer.scale_rule is not ScaleRule.FLOOR:
        attributes["scale_rule"] = quantizer.scale_rule.value
    if quantizer.nonfinite is not plain.nonfinite:
        attributes["nonfinite"] = quantizer.nonfinite.value
    return op_type, attributes


def _is_mx(fmt: BlockFormat) -> bool:
    """An OCP element and nothing more; bfp16, which has one too, tells itself apart by its policy for NaN."""
    is_plain = fmt.sub_blocks is None and not fmt.flush_subnormals and not fmt.carry
    return is_plain and fmt.element in MX_ELEMENTS.values() and fmt.default_nonfinite is NonFinite.BLOCK_NAN


def _bfp_attributes(fmt: BlockFormat) -> dict[str, AttributeValue]:
    """bfp_method and all that describes the bits of a BFP format."""
    obstacle = _bfp_obstacle(fmt)
    if obstacle:
        raise InvalidValueError(
            f"format '{fmt}' cannot be written as an operator of {DOMAIN}: {obstacle}. "
            f"{MX_QUANTIZE_DEQUANTIZE.name} takes the elements {', '.join(MX_ELEMENTS)}; "
            f"{BFP_QUANTIZE_DEQUANTIZE.name} takes integers of 2..22 bits with one integer bit"
        )
    attributes: dict[str, AttributeValue] = {
        "bfp_method": TO_BFP_PRIME if fmt.sub_blocks else TO_BFP,
        "bit_width": fmt.element.bits - 1 + BIT_WIDTH_OVERHEAD,
        "use_compiler_version_cpu_kernel": int(fmt.carry),
    }
    if fmt.sub_blocks:
        attributes["sub_block_size"] = fmt.sub_blocks.size
        attributes["sub_block_shift_bits"] = fmt.sub_blocks.shift_bits
    return attributes


def _bfp_obstacle(fmt: BlockFormat) -> str:
    """Why BFPQuantizeDequantize cannot be this format; empty if it can."""
    element = fmt.element
    if not isinstance(element, IntFormat) or not element.signed or element.fraction_bits != element.bits - 2:
        return f"its element '{element}' is no signed integer with one integer bit"
    if fmt.flush_subnormals != (fmt.sub_blocks is not None):
        return "sub-blocks and flushed subnormals come together there"
    if element.symmetric == fmt.carry:
        return "the lowest code is used exactly where an element may raise its block's exponent"
    return ""


def node_attributes(node: onnx.NodeProto) -> dict[str, object]:
    """The attributes of a node as Python values, strings decoded."""
    values: Mapping[str, object] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    # text that is none becomes one that no attribute allows
    return {name: each.decode(errors="replace") if isinstance(each, bytes) else each for name, each in values.items()}


def is_ours(node: onnx.NodeProto) -> bool:
    return bool(node.domain == DOMAIN and node.op_type in OPERATORS)


def describe(node: onnx.NodeProto) -> str:
    """The node as an error message calls it; one without a name is known by its output."""
    return f"node '{node.name or node.output[0]}' ({node.op_type})"


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs inside a node, such as the branches of an If."""
    return [graph for a in node.attribute for graph in ([a.g] if a.HasField("g") else a.graphs)]


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes and those in their subgraphs, at any depth."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)
