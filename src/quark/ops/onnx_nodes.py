"""A format as an ONNX node: the quantizer's options as attributes, and back; marks on constants.

All attributes that existing runtimes know are written, even with their default; `scale_rule` and `nonfinite` only if
they differ from their default, so that files look like those of other tools where possible.

A weight that is already rounded to a block format needs no quantizer at run time, and one would be expensive: ONNX
Runtime does not fold nodes of foreign domains, so the weight would not be a constant for the convolution behind it, and
would be rounded again at every run. Still, the file should say what format the weight has. So a weight has a node with
the same name and attributes as an activation, in a domain of its own, and the model a function for it whose body is
Identity: the mark. Every runtime inlines the function and drops the Identity when the session is created.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx
from onnx import ModelProto, NodeProto, helper

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
    FLOAT_SCALE_QUANTIZE_DEQUANTIZE,
    FLOAT_SCALES,
    MX_QUANTIZE_DEQUANTIZE,
    OPERATORS,
    ROUNDING_MODES,
    TO_BFP,
    TO_BFP_PRIME,
    VERSION,
    AttributeValue,
    quantizer_of,
)

CONSTANT_DOMAIN = f"{DOMAIN}.constant"
MIN_IR_VERSION = 9  # functions came with 8, defaults for their attributes with 9


def make_block_node(
    quantizer: BlockQuantizer,
    axis: int,
    input: str,
    output: str,
    name: str = "",
    *,
    convert_to_bfloat: bool = False,
    tensor_scale: str = "",
) -> onnx.NodeProto:
    """The node that quantizes and dequantizes `input` along `axis`. The error for a format that no operator can express
    says why. `convert_to_bfloat` rounds to bfloat16 first, which only block float and microexponents can.
    `tensor_scale` names the tensor that holds the quantizer's tensor scale, if it has one."""
    op_type, attributes = block_attributes(quantizer, axis, convert_to_bfloat)
    if (stored_tensor_scale(quantizer) is None) != (not tensor_scale):
        raise InvalidValueError(
            f"tensor_scale '{tensor_scale}': expected the name of a tensor exactly if the quantizer has a tensor scale"
        )
    inputs = [input, tensor_scale] if tensor_scale else [input]
    node = helper.make_node(op_type, inputs, [output], name, domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    return node


def stored_tensor_scale(quantizer: BlockQuantizer) -> float | None:
    """The number in the operator's input `tensor_scale`; None if the input is absent."""
    fmt = quantizer.format
    return 1.0 if fmt.scale is not None and not fmt.has_tensor_scale else quantizer.tensor_scale


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
    """The operator and the attributes of this quantizer; the inverse of `quantizer_of`."""
    fmt = quantizer.format
    if fmt.scale is not None:
        return FLOAT_SCALE_QUANTIZE_DEQUANTIZE.name, _float_scale_attributes(quantizer, axis, convert_to_bfloat)
    is_plain = fmt.sub_blocks is None and not fmt.flush_subnormals and not fmt.carry
    # bfp16 has an OCP element too, but another policy for NaN
    is_mx = is_plain and fmt.element in MX_ELEMENTS.values() and fmt.default_nonfinite is NonFinite.BLOCK_NAN
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


def _float_scale_attributes(quantizer: BlockQuantizer, axis: int, convert_to_bfloat: bool) -> dict[str, AttributeValue]:
    fmt = quantizer.format
    if fmt.element not in MX_ELEMENTS.values() or str(fmt.scale) not in FLOAT_SCALES or convert_to_bfloat:
        what = "convert_to_bfloat" if convert_to_bfloat else f"format '{fmt}'"
        raise InvalidValueError(
            f"{what}: {FLOAT_SCALE_QUANTIZE_DEQUANTIZE.name} takes the elements {', '.join(MX_ELEMENTS)} with scales "
            f"of {', '.join(FLOAT_SCALES)}, and does not round to bfloat16 first"
        )
    attributes: dict[str, AttributeValue] = {
        "element_dtype": str(fmt.element),
        "scale_dtype": str(fmt.scale),
        "axis": axis,
        "block_size": fmt.block_size,
        "rounding_mode": ROUNDING_MODES.index(quantizer.rounding),
    }
    if quantizer.scale_rule is not ScaleRule.FLOOR:
        attributes["scale_rule"] = quantizer.scale_rule.value
    if quantizer.nonfinite is not NonFinite.BLOCK_NAN:
        attributes["nonfinite"] = quantizer.nonfinite.value
    return attributes


def _bfp_attributes(fmt: BlockFormat) -> dict[str, AttributeValue]:
    """bfp_method and the attributes that describe the bits of a BFP format."""
    element, obstacle = fmt.element, ""
    if not isinstance(element, IntFormat) or not element.signed or element.fraction_bits != element.bits - 2:
        obstacle = f"its element '{element}' is no signed integer with one integer bit"
    elif fmt.flush_subnormals != (fmt.sub_blocks is not None):
        obstacle = "sub-blocks and flushed subnormals come together there"
    elif element.symmetric == fmt.carry:
        obstacle = "the lowest code is used exactly where an element may raise its block's exponent"
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


def node_attributes(node: onnx.NodeProto) -> dict[str, object]:
    """The attributes of a node as Python values, strings decoded."""
    values: Mapping[str, object] = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    # bytes that are not UTF-8 become text that no attribute allows
    return {
        name: value.decode(errors="replace") if isinstance(value, bytes) else value for name, value in values.items()
    }


def is_ours(node: onnx.NodeProto) -> bool:
    """True for an operator of `com.amd.quark`."""
    return bool(node.domain == DOMAIN and node.op_type in OPERATORS)


def describe(node: onnx.NodeProto) -> str:
    """The node's name for error messages: that of its output if it has none."""
    return f"node '{node.name or node.output[0]}' ({node.op_type})"


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs inside a node, such as the branches of an If."""
    return [graph for a in node.attribute for graph in ([a.g] if a.HasField("g") else a.graphs)]


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """The nodes, and those in their subgraphs at any depth."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def is_constant_mark(node: NodeProto) -> bool:
    """True if the node only states the format of a constant; it needs an input and an output for that."""
    return bool(node.domain == CONSTANT_DOMAIN and node.input and node.output)


def define_constant_marks(model: ModelProto) -> None:
    """Add the functions of the marks that the model uses."""
    used = {node.op_type for node in all_nodes(model.graph.node) if is_constant_mark(node)}
    if not used:
        return
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    others = [function for function in model.functions if function.domain != CONSTANT_DOMAIN]
    functions = [
        helper.make_function(
            CONSTANT_DOMAIN,
            name,
            list(operator.inputs[: 1 + operator.optional_inputs]),
            ["y"],
            [helper.make_node("Identity", ["x"], ["y"])],
            [helper.make_opsetid("", opset)],
            attribute_protos=[  # with defaults, whatever they are: strict evaluators need a value for each
                helper.make_attribute(
                    attribute.name, attribute.default if attribute.default is not None else attribute.kind()
                )
                for attribute in operator.attributes
            ],
        )
        for name, operator in OPERATORS.items()
        if name in used
    ]
    del model.functions[:]
    model.functions.extend([*others, *functions])
    if all(entry.domain != CONSTANT_DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(CONSTANT_DOMAIN, VERSION))
    model.ir_version = max(model.ir_version, MIN_IR_VERSION)
