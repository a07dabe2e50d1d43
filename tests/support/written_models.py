"""Small models, written as text, and what ONNX Runtime computes with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

from quark.onnx.session import open_session

RNG = np.random.default_rng(3)
NUMBERS = (RNG.standard_normal(32) * 2).astype(np.float32)  # every model of these tests reads 32 numbers


def build(text: str, opset: int = 21, **arrays: NDArray[Any]) -> onnx.ModelProto:
    """A model of `text`, the graph in ONNX's syntax, with these initializers."""
    graph = parser.parse_graph(text)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model)
    return model


def numbers(model: onnx.ModelProto, name: str) -> NDArray[Any]:
    """The initializer of that name."""
    return numpy_helper.to_array(next(each for each in model.graph.initializer if each.name == name))


def operators(model: onnx.ModelProto) -> list[str]:
    """The operators of the main graph, in order."""
    return [node.op_type for node in model.graph.node]


def outputs(model: onnx.ModelProto, **feeds: Any) -> list[NDArray[Any]]:
    """What ONNX Runtime computes, without its optimizations."""
    onnx.checker.check_model(model, full_check=True)
    session = open_session(model, threads=1, has_optimizations=False)
    feeds = feeds or {
        input_.name: NUMBERS.reshape(input_.shape) for input_ in session.get_inputs() if input_.type == "tensor(float)"
    }
    return [np.asarray(each) for each in session.run(None, feeds)]
