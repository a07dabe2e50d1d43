"""Make a model with quark's operators run on any ONNX Runtime from 1.20 on.

`add_portable_functions` gives the model a function, in ordinary ONNX operators, for each operator of `com.amd.quark`
that it uses. A runtime without quark's library runs the function; one with it uses the native kernel. The values are
the same, unless the session is told to treat subnormal numbers as zero.

A function's body must be written for the model's own opset: some operators moved their inputs since. Opsets from 13 on
are supported, the first of them with limits:

    13, 14    no operator follows the type of its input. float16 nodes are put between Casts, for which their type must
              be known; ExtendedQuantizeLinear has one type in all of the model
    13        no empty tensors: a 0 in a shape means something else there

What depends on attributes and known shapes alone is computed when a session is made, and so is the whole of a function
of a constant. Making the session takes some 30 to 100 ms for each node that calls a function, and grows faster than
their number in a model with hundreds.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import FunctionProto, ModelProto, NodeProto, helper

from quark.errors import InvalidValueError, ModelError, QuarkError, UnsupportedTypeError
from quark.formats.block import BlockQuantizer
from quark.formats.spec import ScaleRule
from quark.ops.function_body import CAST_LIKE_OPSET
from quark.ops.onnx_nodes import all_nodes, describe, is_ours, node_attributes
from quark.ops.portable_bfp import bfp_function
from quark.ops.portable_linear import dequantize_linear_function, quantize_linear_function
from quark.ops.portable_mse import MAX_BLOCK
from quark.ops.portable_mx import mx_function
from quark.ops.portable_types import put_float16_between_casts, single_quantized_type
from quark.ops.schema import (
    BFP_QUANTIZE_DEQUANTIZE,
    DOMAIN,
    EXTENDED_DEQUANTIZE_LINEAR,
    EXTENDED_QUANTIZE_LINEAR,
    MX_QUANTIZE_DEQUANTIZE,
    OPERATORS,
    VERSION,
    quantizer_of,
)

MIN_OPSET = 13
MAX_PADDED_BLOCK = 2**24
MIN_IR_VERSION = 9  # functions came with 8, defaults for their attributes with 9


def add_portable_functions(model: ModelProto) -> ModelProto:
    """A copy of the model in which every operator of `com.amd.quark` that it uses has a function.

    Functions of that kind which are there already are replaced. The opset stays; the IR version becomes 9 if it was
    lower. A model that uses none of the operators comes back as it was. Attributes are checked; an illegal one, an
    opset below 13 or, in opsets 13 and 14, a type that cannot be found is a ModelError that names the node.
    """
    if not isinstance(model, ModelProto):
        raise UnsupportedTypeError(
            f"model: expected an onnx.ModelProto, got {type(model).__name__}; onnx.load reads files"
        )
    result = ModelProto()
    result.CopyFrom(model)
    define_portable_functions(result)
    return result


def define_portable_functions(model: ModelProto) -> None:
    """The same, to the model itself: a copy of large weights takes time and memory."""
    bodies = [model.graph.node, *(function.node for function in model.functions)]
    nodes = [node for body in bodies for node in all_nodes(body) if is_ours(node)]
    used = {node.op_type for node in nodes}
    if not used:
        return
    opset = _default_opset(model)
    for node in nodes:
        _check(node)
    quantized_type = None
    if opset < CAST_LIKE_OPSET:
        quantized_type = single_quantized_type(model)
        put_float16_between_casts(model)
    functions = [_function(name, opset, quantized_type) for name in OPERATORS if name in used]
    _replace_functions(model, functions)
    model.ir_version = max(model.ir_version, MIN_IR_VERSION)


def _default_opset(model: ModelProto) -> int:
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), None)
    if opset is None or opset < MIN_OPSET:
        raise ModelError(
            f"the model has opset {opset or 'none'} of the default domain; functions for {DOMAIN} need {MIN_OPSET} or "
            f"later: convert the model, for example with onnx.version_converter"
        )
    return int(opset)


def _check(node: NodeProto) -> None:
    """The number of inputs, and the attributes unless a surrounding function decides them."""
    operator = OPERATORS[node.op_type]
    given = [name for name in node.input if name]
    if len(given) != len(operator.inputs):
        raise ModelError(f"{describe(node)} has {len(given)} inputs, expected {', '.join(operator.inputs)}")
    if any(attribute.ref_attr_name for attribute in node.attribute):
        return
    try:
        if len(operator.inputs) == 1:
            _check_reach(quantizer_of(node.op_type, node_attributes(node))[0])
        else:
            operator.resolve(node_attributes(node))
    except QuarkError as error:
        raise ModelError(f"{describe(node)}: {error}") from error


def _check_reach(quantizer: BlockQuantizer) -> None:
    if quantizer.format.block_size > MAX_PADDED_BLOCK:
        raise InvalidValueError(
            f"block_size {quantizer.format.block_size}: a portable function fills a last block up with zeros and "
            f"takes blocks of at most {MAX_PADDED_BLOCK}; where the axis is shorter, its length means the same"
        )
    if quantizer.scale_rule is ScaleRule.MSE and quantizer.format.block_size > MAX_BLOCK:
        raise InvalidValueError(
            f"block_size {quantizer.format.block_size} with scale_rule 'mse': a portable function takes blocks of at "
            f"most {MAX_BLOCK}; choose a smaller block or another rule"
        )


def _function(name: str, opset: int, quantized_type: int | None) -> FunctionProto:
    writers: dict[str, Callable[[], FunctionProto]] = {
        MX_QUANTIZE_DEQUANTIZE.name: lambda: mx_function(opset),
        BFP_QUANTIZE_DEQUANTIZE.name: lambda: bfp_function(opset),
        EXTENDED_QUANTIZE_LINEAR.name: lambda: quantize_linear_function(opset, quantized_type),
        EXTENDED_DEQUANTIZE_LINEAR.name: lambda: dequantize_linear_function(opset),
    }
    return writers[name]()


def _replace_functions(model: ModelProto, functions: list[FunctionProto]) -> None:
    """Put the functions in place of those of the same operators, and make their domain known where it is used."""
    others = [f for f in model.functions if not (f.domain == DOMAIN and f.name in OPERATORS)]
    for imports in (model.opset_import, *(f.opset_import for f in others if any(map(is_ours, all_nodes(f.node))))):
        if all(entry.domain != DOMAIN for entry in imports):
            imports.append(helper.make_opsetid(DOMAIN, VERSION))
    del model.functions[:]
    model.functions.extend([*others, *functions])
