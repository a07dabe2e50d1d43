"""Block operators that do what stands before them, in one pass over memory, for CPUs.

Small formats have some operators before a quantizer: a Relu6 whose channels were rescaled is a Min with a bound for
each channel, and centering pads a tensor and subtracts the mean of channels. ONNX Runtime reads and
writes the whole tensor for each of them, which takes as long as the quantizer does. So

    x -> Min(bounds) -> Pad(pads) -> Sub(centers) -> Q        becomes        prepared Q(x, bounds, centers, pads)

an operator of domain `com.amd.quark.cpu` with the name and the attributes of Q. The file defines it as a function of
these operators, so any runtime computes the same, with our library or without. An operator that is absent has a neutral
value: a bound of infinity, a center of 0, pads of 0.

    prepare     replaces the nodes of a graph;  define_functions   adds the functions to the model
    expand      is the inverse of prepare; what reads a file uses it to see the original operators
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import helper

from quark.onnx.graph import (
    add_initializer,
    add_node,
    attribute,
    constant,
    input_value,
    is_read_once,
    opset,
    remove_dead,
    replace_input,
)
from quark.ops.schema import BLOCK_OPERATORS, BY_METHOD, DOMAIN, OPERATORS, VERSION

CPU_DOMAIN = f"{DOMAIN}.cpu"
INPUTS = ("x", "bounds", "centers", "pads")
MIN_OPSET = 11  # Pad takes its sizes as an input
_RANK = 4

Array = NDArray[Any]


@dataclass
class _Preparation:
    """What happens to `source` before it is quantized."""

    source: ir.Value
    bounds: Array = field(default_factory=lambda: np.array([np.inf], np.float32))
    centers: Array = field(default_factory=lambda: np.zeros(1, np.float32))
    pads: Array = field(default_factory=lambda: np.zeros(2 * _RANK, np.int64))


def prepare(model: ir.Model) -> int:
    """Replace block operators of the main graph, with the operators before them that they can do. Return how many."""
    count = 0
    if opset(model) < MIN_OPSET:
        return count
    for node in list(model.graph):
        if node.op_type not in BLOCK_OPERATORS or node.domain != DOMAIN or len([v for v in node.inputs if v]) > 1:
            continue
        preparation = _preparation(node)
        if preparation is None:
            continue
        value, result = node.inputs[0], node.outputs[0]
        assert value is not None, node.name
        result.type, result.shape = value.type, value.shape  # pads are an input: no runtime infers the shape
        node.domain = CPU_DOMAIN
        replace_input(node, 0, preparation.source)
        for index, role in enumerate(INPUTS[1:], start=1):
            replace_input(node, index, add_initializer(model, f"{value.name}_{role}", getattr(preparation, role)))
        count += 1
    if count:
        model.opset_imports[CPU_DOMAIN] = VERSION
        remove_dead(model)
    return count


def _preparation(node: ir.Node) -> _Preparation | None:
    """What the nodes before a block operator do, as far back as it can do that; None if there is nothing."""
    value = input_value(node, 0)
    if value is None or value.dtype is not ir.DataType.FLOAT or value.shape is None or len(value.shape) != _RANK:
        return None
    channels = value.shape[1]
    if int(attribute(node, "axis", 1)) not in (1, 1 - _RANK) or not isinstance(channels, int):
        return None
    preparation = _Preparation(value)
    for op_type in ("Sub", "Pad", "Min"):  # from the quantizer back
        before = preparation.source.producer()
        if before is None or before.op_type != op_type or before.domain or not is_read_once(preparation.source):
            continue
        source, numbers = input_value(before, 0), constant(input_value(before, 1))
        if source is None or numbers is None or len(before.inputs) > (3 if op_type == "Pad" else 2):
            continue
        if op_type == "Pad":
            is_zero = attribute(before, "mode", "constant") == "constant" and _is_zero(before)
            is_inside = numbers.size == 2 * _RANK and numbers.min() >= 0 and not numbers[[0, 1, 4, 5]].any()
            if not is_zero or not is_inside:
                continue
            preparation.pads = numbers
        else:
            by_channel = _by_channel(numbers, channels)
            if by_channel is None or (op_type == "Min" and not (by_channel > 0).all()):
                continue
            if op_type == "Min":
                preparation.bounds = by_channel
            else:
                preparation.centers = by_channel
        preparation.source = source
    return None if preparation.source is value else preparation


def _is_zero(pad: ir.Node) -> bool:
    """True if a Pad fills up with zeros."""
    given = input_value(pad, 2)
    number = constant(given)
    return given is None or (number is not None and not number.any())


def _by_channel(numbers: Array, channels: int) -> Array | None:
    """A constant as one number, or one for each channel; None if it is neither."""
    if numbers.dtype != np.float32 or not np.isfinite(numbers).all():
        return None
    if numbers.size == 1 and numbers.ndim <= _RANK:
        return numbers.reshape(1)
    return numbers.reshape(-1, 1, 1) if numbers.shape in ((channels, 1, 1), (1, channels, 1, 1)) else None


def expand(model: ir.Model) -> None:
    """Replace prepared block operators by the operators that they stand for."""
    names = {value.name for node in model.graph for value in node.outputs}
    for node in list(model.graph):
        if node.domain != CPU_DOMAIN or node.op_type not in BLOCK_OPERATORS:
            continue
        value, name = node.inputs[0], str(node.name)
        steps = (("Min", 1, np.isposinf), ("Pad", 3, np.logical_not), ("Sub", 2, np.logical_not))
        for op_type, index, is_neutral in steps:
            given = input_value(node, index)
            numbers = None if given is None else given.const_value
            # larger ones hold a number for each channel, and may not be in memory
            if numbers is None or numbers.size > 2 * _RANK or not is_neutral(numbers.numpy()).all():
                inputs, shaped = [value, given], value if op_type == "Min" else node.outputs[0]
                value = add_node(model, op_type, inputs, before=node, name=f"{name}_{op_type}").outputs[0]
                value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), None if shaped is None else shaped.shape
        tensor = str(node.inputs[1].name).removesuffix("_bounds") if node.inputs[1] is not None else ""
        if value is not None and value is not node.inputs[0] and tensor and tensor not in names:
            value.name = tensor  # as it was called before
        node.domain = DOMAIN
        replace_input(node, 0, value)
        node.resize_inputs(1)
    model.opset_imports.pop(CPU_DOMAIN, None)
    for key in [key for key in model.functions if key[0] == CPU_DOMAIN]:
        del model.functions[key]


def define_functions(model: onnx.ModelProto) -> None:
    """Add the function of every prepared block operator that the model uses, in place."""
    used: dict[str, set[str]] = {}  # with the attributes that nodes give
    for node in model.graph.node:
        if node.domain == CPU_DOMAIN:
            used.setdefault(node.op_type, set()).update(attr.name for attr in node.attribute)
    version = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    imports = [helper.make_opsetid("", version), helper.make_opsetid(DOMAIN, VERSION)]
    for name in (op_type for op_type in BLOCK_OPERATORS if op_type in used):
        quantize = helper.make_node(name, ["centered"], ["y"], domain=DOMAIN)
        defaults = []
        for attr in (attr for attr in OPERATORS[name].attributes if attr.name in used[name]):
            default = BY_METHOD if attr.default is None else attr.default
            defaults.append(helper.make_attribute(attr.name, default))
            quantize.attribute.add(name=attr.name, ref_attr_name=attr.name, type=defaults[-1].type)
        body = [
            helper.make_node("Min", ["x", "bounds"], ["bounded"]),
            helper.make_node("Pad", ["bounded", "pads"], ["padded"]),
            helper.make_node("Sub", ["padded", "centers"], ["centered"]),
            quantize,
        ]
        model.functions.append(
            helper.make_function(CPU_DOMAIN, name, INPUTS, ["y"], body, imports, attribute_protos=defaults)
        )
