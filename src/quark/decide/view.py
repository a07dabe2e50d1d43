"""A graph as decisions see it, the same for an ONNX model and for a captured torch network.

`Graph`, `Node` and `Value` are a snapshot of the graph, in ONNX's terms: an aten convolution is a
`Conv` with its weight as input 1, a clamp is a `Clip`. All decisions (selection, placement, choosing, the NPU's limits,
equalization) read the snapshot and never the graph behind it. `quark.onnx.view` and `quark.torch.view` take it;
`origin` is the original node or tensor, for the code that changes the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quark.formats.affine import find_ranges

Array: TypeAlias = NDArray[Any]
Shape: TypeAlias = tuple["int | None", ...]


class Constant(Protocol):
    """The numbers of a weight, a bias or another constant. Large ones are read piece by piece if possible."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def array(self) -> Array:
        """The whole array, which must not be written to."""
        ...

    def extremes(self, axis: int | None = None, group_size: int | None = None) -> tuple[Array, Array]:
        """(lowest, highest), flat: of the tensor, of each channel of `axis`, or of each group along it."""
        ...

    def is_finite(self) -> bool:
        """True if there is neither NaN nor Inf."""
        ...


@dataclass(frozen=True, eq=False)
class ArrayConstant:
    """A constant in memory."""

    values: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def array(self) -> Array:
        return self.values

    def extremes(self, axis: int | None = None, group_size: int | None = None) -> tuple[Array, Array]:
        low, high = find_ranges(np.ascontiguousarray(self.values, np.float32), axis, group_size)
        return np.atleast_1d(low).ravel(), np.atleast_1d(high).ravel()

    def is_finite(self) -> bool:
        return all_finite(self.values)


def all_finite(array: Array) -> bool:
    """True if all numbers are finite. A finite sum has finite terms and takes half the time; large terms can overflow
    it, so an infinite sum is checked number by number."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(array.sum()) or np.isfinite(array).all())


@dataclass(eq=False, slots=True)
class Value:
    """A tensor. `outputs` are its indices among the graph outputs; `readers` are the nodes that read it, with the index
    of the input, including nodes inside subgraphs (`Node.is_inner`)."""

    name: str
    origin: Any
    shape: Shape | None = None
    type_name: str | None = None  # float32, int64 ...; None if unknown
    is_quantizable: bool = False  # real numbers of a type that can be quantized
    constant: Constant | None = None
    producer: Node | None = None
    readers: list[tuple[Node, int]] = field(default_factory=list)
    outputs: tuple[int, ...] = ()

    @property
    def is_number(self) -> bool:
        """True if it is known to be a tensor of real numbers, of any width."""
        return self.type_name in ("float", "float16", "bfloat16", "double", "float32", "float64")

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    def size(self, axis: int) -> int | None:
        """The size along an axis, if known."""
        return self.shape[axis] if self.shape is not None and 0 <= axis < len(self.shape) else None

    def array(self) -> Array | None:
        """The numbers of a constant; None for other values."""
        return None if self.constant is None else self.constant.array()


@dataclass(eq=False, slots=True)
class Node:
    """An operator. `op_type` is ONNX's name for it, if `is_standard`; an operator of another domain has its own.

    `label` is what users call it: the node's name in ONNX, the path of the module in torch. `aliases` are further names
    that a user's pattern may match.
    """

    name: str
    op_type: str
    origin: Any
    label: str = ""
    aliases: tuple[str, ...] = ()
    # names that users have for its type: the op type, in torch also the class of its module
    kinds: tuple[str, ...] = ()
    inputs: Sequence[Value | None] = ()
    outputs: Sequence[Value] = ()
    is_standard: bool = True
    has_quantized_form: bool = True  # false for an operator whose operands are not all tensors
    is_inner: bool = False  # inside a subgraph: listed only among the readers of a value
    is_plumbing: bool = False  # not a layer to a user: sizes, copies
    is_transparent: bool = False  # passes its input on unchanged: dropout at inference, copies
    why_float: str = ""  # the reason to give if it has no quantized form; empty if none is known
    reads_float_for: str = ""  # the node whose quantizer follows it, so that it has to read float
    settings: Callable[[str], Any] = lambda name: MISSING

    def setting(self, name: str, default: Any = None) -> Any:
        """A parameter by its ONNX name, whether the operator has it as an attribute, as a constant input or (in torch)
        as an argument: group, transA, transB, alpha, beta, perm, axis, axes, pads, mode ...

        Some have a form of their own: `bounds` of a Clip is (low, high), infinite if there is none; `pads` of a Pad is
        a tuple of (axis, before, behind), and `fill` the number that it adds; `transA` of a Gemm is None if its data
        may have any rank. Returns `default` if the parameter is missing, and None if it is only known at run time.
        """
        value = self.settings(name)
        return default if value is MISSING else value

    def input(self, index: int) -> Value | None:
        return self.inputs[index] if 0 <= index < len(self.inputs) else None


MISSING: Any = object()  # returned by `Node.settings` for a missing parameter


class Graph:
    """The nodes in graph order."""

    def __init__(self, nodes: Sequence[Node], matches: Callable[[str, Node], bool], word: str = "node") -> None:
        self.nodes = nodes
        self.matches = matches  # tells whether a user's pattern matches a node
        self.word = word  # what users call a node
        self.by_name = {node.name: node for node in nodes}

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def matching(self, pattern: str) -> list[str]:
        """The names of all nodes that a pattern matches."""
        return [node.name for node in self.nodes if not node.is_plumbing and self.matches(pattern, node)]

    def constants(self) -> dict[str, Value]:
        """All constants that nodes read, by name."""
        values = (value for node in self.nodes for value in node.inputs)
        return {value.name: value for value in values if value is not None and value.constant is not None}
