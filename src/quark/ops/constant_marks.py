"""Marks on constants: which block format the numbers of a weight are in.

A weight that a block format has rounded already needs no quantizer at run time, and one would cost: ONNX Runtime does
not fold nodes of foreign domains, so that the weight would be no constant to the convolution behind it, and be rounded
again at every run. Yet the file should say what the weight is.

So a weight has a node of the same name and attributes as an activation, in a domain of its own, and the model a
function for it whose body is Identity. Every runtime takes the function in and drops the Identity when the session is
made.
"""

from __future__ import annotations

from onnx import FunctionProto, ModelProto, NodeProto, helper

from quark.ops.onnx_nodes import all_nodes
from quark.ops.schema import DOMAIN, OPERATORS, VERSION

CONSTANT_DOMAIN = f"{DOMAIN}.constant"
MIN_IR_VERSION = 9  # functions came with 8, defaults for their attributes with 9


def is_constant_mark(node: NodeProto) -> bool:
    """That the node only tells the format of a constant. One without an input or an output tells nothing."""
    return bool(node.domain == CONSTANT_DOMAIN and node.input and node.output)


def define_constant_marks(model: ModelProto) -> None:
    """Give the model the functions of the marks that it uses."""
    used = {node.op_type for node in all_nodes(model.graph.node) if is_constant_mark(node)}
    if not used:
        return
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    others = [function for function in model.functions if function.domain != CONSTANT_DOMAIN]
    functions = [_identity(name, opset) for name in OPERATORS if name in used]
    del model.functions[:]
    model.functions.extend([*others, *functions])
    if all(entry.domain != CONSTANT_DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(CONSTANT_DOMAIN, VERSION))
    model.ir_version = max(model.ir_version, MIN_IR_VERSION)


def _identity(name: str, opset: int) -> FunctionProto:
    """Attributes have defaults, whatever they are: evaluators that are strict want a value for each."""
    return helper.make_function(
        CONSTANT_DOMAIN,
        name,
        ["x"],
        ["y"],
        [helper.make_node("Identity", ["x"], ["y"])],
        [helper.make_opsetid("", opset)],
        attribute_protos=[
            helper.make_attribute(each.name, each.default if each.default is not None else each.kind())
            for each in OPERATORS[name].attributes
        ],
    )
