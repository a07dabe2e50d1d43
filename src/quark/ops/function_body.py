"""Write the body of an ONNX function as arithmetic.

A `Value` is a tensor of the function: `a * b + 1.0` appends a Mul and an Add, and a Python number becomes a constant of
the other operand's type. `FunctionBody` collects the nodes for one opset and has what a body that depends on attributes
needs:

    body.attribute    an attribute of the calling node as a tensor
    body.place        the index of an attribute's value in a list, for lookups in tables
    body.branch       an If; ONNX Runtime removes it if it depends on attributes only
    body.shortcut     an If that only saves work

ONNX cannot compare strings before opset 19, but TfIdfVectorizer, given one word and a list of words, marks the equal
one: a product of these zeros and a one with 1, 2, 3... is its index. It works for integers too. A value that is not in
the table, or any other violated requirement, makes a Gather read beyond its end: the runtime stops there, with the name
of that node in its message, which says what was expected.

ONNX Runtime copies the body for every node that calls the function, so each node here adds to the time that it takes to
create a session.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Union

import numpy as np
import onnx
from onnx import AttributeProto, FunctionProto, NodeProto, TensorProto, helper, numpy_helper

from quark.ops.schema import DOMAIN, Attribute, AttributeValue, Operator

FLOAT, DOUBLE, INT64, BOOL = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.BOOL

REDUCTION_AXES_AS_INPUT_OPSET = 18  # ReduceSum's moved in 13
ALLOWZERO_OPSET = 14  # from here on, a 0 in Reshape's shape can mean zero
CAST_LIKE_OPSET = 15  # from here on, a node can follow the type of another's input

Operand = Union["Value", int, float]


def _binary(op_type: str, type: int | None = None) -> Callable[[Value, Operand], Value]:
    return lambda self, other: self.body.op(op_type, self, other, type=type)


@dataclass(frozen=True)
class Value:
    """A tensor inside a function, with the element type for numbers combined with it."""

    body: FunctionBody
    name: str
    type: int

    __add__ = _binary("Add")
    __sub__ = _binary("Sub")
    __mul__ = _binary("Mul")
    __truediv__ = _binary("Div")
    __floordiv__ = _binary("Div")  # for integers, neither of them negative
    __or__ = _binary("Or")
    __and__ = _binary("And")
    __gt__ = _binary("Greater", BOOL)
    __ge__ = _binary("GreaterOrEqual", BOOL)
    __lt__ = _binary("Less", BOOL)
    __le__ = _binary("LessOrEqual", BOOL)
    equals = _binary("Equal", BOOL)

    def __rsub__(self, other: Operand) -> Value:
        return self.body.op("Sub", self.body.constant(other, self.type), self)

    def __rtruediv__(self, other: Operand) -> Value:
        return self.body.op("Div", self.body.constant(other, self.type), self)

    def __abs__(self) -> Value:
        return self.body.op("Abs", self)

    def __neg__(self) -> Value:
        return self.body.op("Neg", self)

    def __invert__(self) -> Value:
        return self.body.op("Not", self)

    def where(self, then: Operand, otherwise: Operand) -> Value:
        """`then` where this is true; at least one of the two is a Value and determines the type."""
        type = next(v.type for v in (then, otherwise) if isinstance(v, Value))
        return self.body.op("Where", self, *(self.body.value(v, type) for v in (then, otherwise)), type=type)

    def clip(self, low: Operand, high: Operand) -> Value:
        return self.body.op("Clip", self, low, high)

    def cast(self, type: int) -> Value:
        return self.body.op("Cast", self, type=type, to=type)

    def shape(self) -> Value:
        return self.body.op("Shape", self, type=INT64)

    def reshape(self, shape: Value | Sequence[int]) -> Value:
        target = shape if isinstance(shape, Value) else self.body.constant(list(shape), INT64)
        if self.body.opset >= ALLOWZERO_OPSET and isinstance(shape, Value):
            return self.body.op("Reshape", self, target, allowzero=1)
        return self.body.op("Reshape", self, target)

    def on_flat(self, function: Callable[[Value], Value], shape: Value | None = None) -> Value:
        """Apply `function` to this tensor as one row, and restore its shape. ONNX Runtime takes 30 times as long to
        combine a number with a tensor whose last dimension is 1."""
        return function(self.reshape([-1])).reshape(self.shape() if shape is None else shape)

    def reduce(self, how: str, axis: int, *, keeps_axis: bool = True) -> Value:
        """A reduction (Max, Sum, ...) over one axis, which stays with size 1 or is removed."""
        if how != "Sum" and self.body.opset < REDUCTION_AXES_AS_INPUT_OPSET:
            return self.body.op(f"Reduce{how}", self, axes=[axis], keepdims=int(keeps_axis))
        return self.body.op(f"Reduce{how}", self, self.body.constant([axis], INT64), keepdims=int(keeps_axis))


@dataclass(frozen=True)
class Place:
    """The index of an attribute's value in the list of legal ones; one beyond the end for other values."""

    index: Value
    expectation: str

    def lookup(self, table: Sequence[object] | Value, type: int = FLOAT) -> Value:
        """The table's entry at this index; the runtime stops if the attribute's value is not legal."""
        body = self.index.body
        entries = table if isinstance(table, Value) else body.constant(table, type)
        return body.op("Gather", entries, self.index, axis=0, expected=self.expectation)


class FunctionBody:
    """The nodes of one function, written for one opset of the default domain."""

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self._constants: dict[tuple[object, ...], tuple[Value, NodeProto]] = {}
        self._scopes: list[list[NodeProto]] = [[]]
        self._numbers = itertools.count()

    def input(self, name: str, type: int) -> Value:
        return Value(self, name, type)

    def constant(self, value: object, type: int) -> Value:
        """A constant tensor. Equal ones share a node, ahead of all others so that every branch can use it."""
        array = np.asarray(value, helper.tensor_dtype_to_np_dtype(type))
        key = (type, array.shape, array.tobytes())
        if key not in self._constants:
            name = f"constant_{next(self._numbers)}"
            node = helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array))
            self._constants[key] = (Value(self, name, type), node)
        return self._constants[key][0]

    def value(self, operand: Operand, type: int) -> Value:
        return operand if isinstance(operand, Value) else self.constant(operand, type)

    def op(
        self, op_type: str, first: Value, *rest: Operand, type: int | None = None, expected: str = "", **attributes: Any
    ) -> Value:
        """Append a node of an ordinary operator; the result has the first input's type unless `type` is given.
        `expected` becomes part of the node's name, for the runtime's message if it fails."""
        inputs = [first.name, *(self.value(operand, first.type).name for operand in rest)]
        output = f"{op_type.lower()}_{next(self._numbers)}"
        name = f"{expected} ({output})" if expected else output
        self._scopes[-1].append(helper.make_node(op_type, inputs, [output], name, **attributes))
        return Value(self, output, first.type if type is None else type)

    def attribute(self, attribute: Attribute) -> Value:
        """An attribute of the calling node as a scalar."""
        is_text = attribute.kind is str
        name = f"{attribute.name}_{next(self._numbers)}"
        node = helper.make_node("Constant", [], [name])
        kind = AttributeProto.STRING if is_text else AttributeProto.INT
        field = "value_string" if is_text else "value_int"
        node.attribute.append(AttributeProto(name=field, ref_attr_name=attribute.name, type=kind))
        self._scopes[-1].append(node)
        return Value(self, name, TensorProto.STRING if is_text else INT64)

    def integer(self, attribute: Attribute) -> Value:
        """An integer attribute as a vector of one element; the runtime stops if it is below its minimum."""
        number = self.attribute(attribute).reshape([1])
        if attribute.minimum is None:
            return number
        return self.stop_if(number < attribute.minimum, number, f"{attribute.name}: expected {attribute.legal}")

    def place(self, attribute: Attribute, values: Sequence[AttributeValue]) -> Place:
        """The index of the attribute's value among `values`."""
        pool: dict[str, Any] = {"pool_strings" if attribute.kind is str else "pool_int64s": list(values)}
        mark = self.op(
            "TfIdfVectorizer", self.attribute(attribute).reshape([1]), type=FLOAT, mode="TF", ngram_counts=[0],
            min_gram_length=1, max_gram_length=1, max_skip_count=0, ngram_indexes=list(range(len(values))), **pool,
        )  # fmt: skip
        # counted from the end, so that without a mark the index is beyond it
        from_end = self.op("MatMul", mark, self.constant(range(len(values), 0, -1), FLOAT))
        index = (len(values) - from_end).cast(INT64)
        return Place(index, f"{attribute.name}: expected {attribute.legal}")

    def stop_if(self, condition: Value, value: Value, expectation: str) -> Value:
        """value, a vector of one element, in the condition's shape; the runtime stops if the condition holds."""
        return self.op("Gather", value, condition.cast(INT64), axis=0, expected=expectation)

    def branch(self, condition: Value, then: Callable[[], Value], otherwise: Callable[[], Value]) -> Value:
        """An If: the functions write the two branches, which may use every value written before. ONNX Runtime runs both
        of them while it folds constants, so neither may fail if the other one applies."""
        branches, values = {}, []
        for field, write in (("then_branch", then), ("else_branch", otherwise)):
            with self._scope() as nodes:
                value = write()
                if not any(value.name in node.output for node in nodes):
                    value = self.op("Identity", value)  # a graph can only return values that it computed itself
            branches[field] = helper.make_graph(nodes, field, [], [onnx.ValueInfoProto(name=value.name)])
            values.append(value)
        return self.op("If", condition, type=values[0].type, **branches)

    def shortcut(self, condition: Value, short: Callable[[], Value], general: Callable[[], Value]) -> Value:
        """What `general` computes, by `short` if the condition holds, where both have the same result. Always `general`
        inside a branch: ONNX Runtime (1.20 to 1.31) may crash when it folds an If within an If."""
        return general() if len(self._scopes) > 1 else self.branch(condition, short, general)

    @contextmanager
    def _scope(self) -> Iterator[list[NodeProto]]:
        self._scopes.append([])
        yield self._scopes[-1]
        self._scopes.pop()

    def function(self, operator: Operator, output: Value, defaults: Mapping[str, AttributeValue]) -> FunctionProto:
        """The finished function. Every attribute has a default, the value that applies if it is absent."""
        nodes = [node for _, node in self._constants.values()] + self._scopes[0]
        nodes.append(helper.make_node("Identity", [output.name], ["y"]))
        return helper.make_function(
            DOMAIN,
            operator.name,
            list(operator.inputs),
            ["y"],
            nodes,
            [helper.make_opsetid("", self.opset)],
            attribute_protos=[helper.make_attribute(key, value) for key, value in defaults.items()],
        )
