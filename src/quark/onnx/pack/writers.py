"""Where the nodes that unpack go: into the graph (`portable`), or into a function that the graph calls (`custom`).

Constants that weights share are put into the graph once. A table for pairs of bytes is computed from one for bytes:
the numbers of the lower byte vary fastest along the second axis, those of the upper along the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from quark.onnx.pack.unpacking import Unpacking

Array = NDArray[Any]

PREFIX = "quark.packed"
FUNCTION_DOMAIN = "com.amd.quark.packed"
FUNCTION_VERSION = 1


@dataclass(eq=False)
class Shared:
    """Constants and nodes that several weights read. `fresh` makes names that the graph does not have."""

    fresh: Callable[[str], str]
    constants: list[onnx.TensorProto] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)

    def table(self, name: str, content: Array) -> str:
        return self._constant(name, name, content)

    def integers(self, values: list[int]) -> str:
        dims = "x".join(map(str, values))
        return self._constant(
            f"dims.{dims}", f"dims.{dims}" if len(values) < 8 else "places", np.array(values, np.int64)
        )

    def _constant(self, key: str, name: str, content: Array) -> str:
        if key not in self._names:
            self._names[key] = self.fresh(f"{PREFIX}.{name}")
            self.constants.append(numpy_helper.from_array(content, self._names[key]))
        return self._names[key]

    def wide_table(self, name: str, content: Array) -> str:
        wide = f"{name}.wide"
        if wide in self._names:
            return self._names[wide]
        each = content.shape[1]
        narrow = self.table(name, content)
        square = self.integers([256, 256, each])
        lower = self._op("Expand", [narrow, square], f"{wide}.lower")
        column = self._op("Reshape", [narrow, self.integers([256, 1, each])], f"{wide}.column")
        upper = self._op("Expand", [column, square], f"{wide}.upper")
        both = self._op("Concat", [lower, upper], f"{wide}.both", axis=2)
        self._names[wide] = self._op("Reshape", [both, self.integers([1 << 16, 2 * each])], wide)
        return self._names[wide]

    def product_table(self, name: str, upper: Array, lower: Array) -> str:
        products = f"{name}.products"
        if products in self._names:
            return self._names[products]
        row = lower.shape[1:]
        ones = [1] * len(row)
        factors = [self.table(f"{name}.upper", upper.reshape(-1, 1, *ones)), self.table(f"{name}.lower", lower)]
        square = self._op("Mul", factors, f"{products}.square")
        dims = self.integers([len(upper) * len(lower), *row])
        self._names[products] = self._op("Reshape", [square, dims], products)
        return self._names[products]

    def _op(self, op_type: str, inputs: list[str], name: str, **attributes: Any) -> str:
        output = self.fresh(f"{PREFIX}.{name}")
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output


@dataclass(eq=False)
class GraphWriter:
    """Nodes of the graph for one weight, whose tensors have the names in `planes`."""

    weight: str
    planes: dict[str, str]
    shared: Shared
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def op(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        output = self.shared.fresh(f"{self.weight}.{op_type}")
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def plane(self, role: str) -> str:
        return self.planes[role]

    def table(self, name: str, content: Array) -> str:
        return self.shared.table(name, content)

    def wide_table(self, name: str, content: Array) -> str:
        return self.shared.wide_table(name, content)

    def product_table(self, name: str, upper: Array, lower: Array) -> str:
        return self.shared.product_table(name, upper, lower)

    def dims(self, role: str, values: list[int]) -> str:
        return self.shared.integers(values)


@dataclass(eq=False)
class FunctionWriter:
    """The body of a function, and what a node that calls it for one weight has: inputs and attributes."""

    planes: dict[str, str]
    shared: Shared
    body: list[onnx.NodeProto] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)  # of the function, and of the node
    attributes: dict[str, list[int]] = field(default_factory=dict)

    def op(self, op_type: str, inputs: list[str], **attributes: Any) -> str:
        output = f"{op_type.lower()}_{len(self.body)}"
        self.body.append(helper.make_node(op_type, inputs, [output], **attributes))
        return output

    def plane(self, role: str) -> str:
        return self._input(role, self.planes[role])

    def table(self, name: str, content: Array) -> str:
        return self._input(f"table_{_identifier(name)}", self.shared.table(name, content))

    def wide_table(self, name: str, content: Array) -> str:
        return self._input(f"table_{_identifier(name)}", self.shared.wide_table(name, content))

    def product_table(self, name: str, upper: Array, lower: Array) -> str:
        return self._input(f"table_{_identifier(name)}", self.shared.product_table(name, upper, lower))

    def dims(self, role: str, values: list[int]) -> str:
        if role in self.attributes:
            return role
        self.attributes[role] = values
        node = helper.make_node("Constant", [], [role])
        attribute = node.attribute.add()
        attribute.name, attribute.ref_attr_name, attribute.type = "value_ints", role, onnx.AttributeProto.INTS
        self.body.append(node)
        return role

    def _input(self, role: str, name: str) -> str:
        self.inputs[role] = name
        return role


def _identifier(name: str) -> str:
    return name.replace(".", "_")


def portable_nodes(unpacking: Unpacking, weight: str, planes: dict[str, str], shared: Shared) -> list[onnx.NodeProto]:
    """Standard operators, the last of which makes the weight."""
    writer = GraphWriter(weight, planes, shared)
    unpacking.write(writer)
    writer.nodes[-1].output[0] = weight
    return writer.nodes


@dataclass(eq=False)
class Functions:
    """The functions that the weights of a model need, by name."""

    opset: int
    defined: dict[str, onnx.FunctionProto] = field(default_factory=dict)

    def node(self, unpacking: Unpacking, weight: str, planes: dict[str, str], shared: Shared) -> onnx.NodeProto:
        """The node that makes the weight; its function is defined where it is the first to call it."""
        writer = FunctionWriter(planes, shared)
        result = unpacking.write(writer)
        name = f"unpack_{unpacking.variant}"
        if name not in self.defined:
            self.defined[name] = self._function(name, writer, result)
        attributes: dict[str, Any] = dict(writer.attributes)
        label = shared.fresh(f"{weight}.{name}")
        inputs = list(writer.inputs.values())
        return helper.make_node(name, inputs, [weight], name=label, domain=FUNCTION_DOMAIN, **attributes)

    def _function(self, name: str, writer: FunctionWriter, result: str) -> onnx.FunctionProto:
        opsets = [helper.make_opsetid("", self.opset)]
        inputs, attributes = list(writer.inputs), list(writer.attributes)
        return helper.make_function(FUNCTION_DOMAIN, name, inputs, [result], writer.body, opsets, attributes=attributes)


def fresh_names(taken: Iterable[str]) -> Callable[[str], str]:
    """A maker of names that are not taken."""
    names = set(taken)

    def fresh(base: str) -> str:
        name, count = base, 0
        while name in names:
            count += 1
            name = f"{base}_{count}"
        names.add(name)
        return name

    return fresh
