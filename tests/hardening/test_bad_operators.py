"""Nodes of our operators that make no sense, through ONNX Runtime: a Python exception that names the operator and what
is wrong, and never the end of the process. One row for each; `tests/native/fuzz_operators.py` makes many more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from quark.onnx import get_library_path

MX, BFP, Q, DQ = ("MXQuantizeDequantize", "BFPQuantizeDequantize", "ExtendedQuantizeLinear", "ExtendedDequantizeLinear")
X = np.linspace(-3, 3, 2 * 40, dtype=np.float32).reshape(2, 40)
ONE = np.array(0.5, np.float32)
ZERO = np.array(0, np.int16)


@dataclass(frozen=True)
class BadNode:
    """`inputs` None stands for X alone, or for X, a scale and a zero point."""

    op_type: str
    words: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    inputs: tuple[Any, ...] | None = None

    @property
    def feeds(self) -> dict[str, Any]:
        if self.inputs is not None:
            values = self.inputs
        elif self.op_type in (MX, BFP):
            values = (X,)
        else:
            values = (X, ONE, ZERO) if self.op_type == Q else (X.astype(np.int16), ONE, ZERO)
        return {f"i{number}": value for number, value in enumerate(values)}

    def __str__(self) -> str:
        kinds = "" if self.inputs is None else f" of {[getattr(input_, 'dtype', '?').name for input_ in self.inputs]}"
        return f"{self.op_type} {self.attributes}{kinds}"


BAD_NODES = (
    BadNode(MX, ("element_dtype", "fp4_e2m1"), {"element_dtype": "fp4_e2m2"}),
    BadNode(MX, ("element_dtype",), {"element_dtype": ""}),
    BadNode(MX, ("block_size",), {"block_size": 0}),
    BadNode(MX, ("block_size",), {"block_size": -32}),
    BadNode(MX, ("axis",), {"axis": 2}),
    BadNode(MX, ("axis",), {"axis": -3}),
    BadNode(MX, ("axis",), {"axis": 2**40}),
    BadNode(MX, ("rounding_mode",), {"rounding_mode": 7}),
    BadNode(MX, ("scale_rule", "floor"), {"scale_rule": "flor"}),
    BadNode(MX, ("nonfinite",), {"nonfinite": "keep"}),
    BadNode(MX, (), {"block_size": "32"}),
    BadNode(MX, (), {"element_dtype": 8}),
    BadNode(MX, (), {}, (X.astype(np.int32),)),
    BadNode(MX, (), {}, (X.astype(np.float64),)),
    BadNode(MX, (), {}, ()),
    BadNode(MX, (), {}, (X, X)),
    BadNode(BFP, ("bfp_method", "to_bfp"), {"bfp_method": "to_bfq"}),
    BadNode(BFP, ("bit_width",), {"bit_width": 9}),
    BadNode(BFP, ("bit_width",), {"bit_width": 31}),
    BadNode(BFP, ("block_size",), {"block_size": 0}),
    BadNode(BFP, ("axis",), {"axis": 5}),
    BadNode(BFP, ("sub_block_size",), {"bfp_method": "to_bfp_prime", "sub_block_size": 0}),
    BadNode(BFP, ("sub_block_size", "16"), {"bfp_method": "to_bfp_prime", "block_size": 16, "sub_block_size": 3}),
    BadNode(BFP, ("sub_block_size", "8"), {"bfp_method": "to_bfp_prime_shared", "sub_block_size": 16}),
    BadNode(BFP, ("sub_block_shift_bits",), {"bfp_method": "to_bfp_prime", "sub_block_shift_bits": 5}),
    BadNode(BFP, ("convert_to_bfloat_before_bfp",), {"convert_to_bfloat_before_bfp": 2}),
    BadNode(BFP, (), {}, (X.astype(np.uint8),)),
    BadNode(Q, ("axis",), {"axis": 3}, (X, np.ones(2, np.float32), np.zeros(2, np.int16))),
    BadNode(Q, ("scale",), {}, (X, np.ones(7, np.float32), np.zeros(7, np.int16))),
    BadNode(Q, ("zero point",), {}, (X, np.ones(2, np.float32), np.zeros(3, np.int16))),
    BadNode(Q, (), {}, (X, ONE, np.array(0, np.int64))),
    BadNode(Q, (), {}, (X, ONE)),
    BadNode(Q, (), {}, (X.astype(np.int32), ONE, ZERO)),
    BadNode(DQ, ("axis",), {"axis": -9}, (X.astype(np.int16), np.ones(2, np.float32), np.zeros(2, np.int16))),
    BadNode(DQ, ("scale",), {}, (X.astype(np.int16), np.ones(3, np.float32), np.zeros(3, np.int16))),
    BadNode(DQ, (), {}, (X.astype(np.int8), ONE, ZERO)),
    BadNode(DQ, (), {}, ()),
)


def _run(node: BadNode) -> Any:
    feeds = node.feeds
    made = helper.make_node(node.op_type, list(feeds), ["y"], "the_node", domain="com.amd.quark", **node.attributes)
    kinds = {name: helper.np_dtype_to_tensor_dtype(feed.dtype) for name, feed in feeds.items()}
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    first = kinds.get({Q: "i2", DQ: "i1"}.get(node.op_type, "i0"), 1)
    graph = helper.make_graph([made], "g", inputs, [helper.make_tensor_value_info("y", first, None)])
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(get_library_path())
    model = helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]


@pytest.mark.parametrize("node", BAD_NODES, ids=str)
def test_is_an_exception_that_names_it(node: BadNode) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - ONNX Runtime has no common class for its errors
        _run(node)
    message = str(caught.value)
    missing = [word for word in (node.op_type, *node.words) if word not in message]
    assert not missing, f"{missing} not in: {message}"


EDGES = (
    BadNode(MX, (), {"block_size": 2**31 - 1}),
    BadNode(MX, (), {"block_size": 2**62}),
    BadNode(BFP, (), {"block_size": 10**6}),
    *(
        BadNode(kind, (), {}, (np.zeros(shape, np.float32),))
        for kind in (MX, BFP)
        for shape in ((), (0,), (3, 0), (0, 5))
    ),
    BadNode(Q, (), {}, (np.zeros((0, 4), np.float32), ONE, ZERO)),
    BadNode(DQ, (), {}, (np.zeros((), np.int16), ONE, ZERO)),
)


@pytest.mark.parametrize("node", EDGES, ids=str)
def test_odd_sizes_are_right(node: BadNode) -> None:
    """A block longer than the axis is the whole axis; nothing comes of nothing; a scalar is a block of its own."""
    assert _run(node).shape == node.feeds["i0"].shape


@pytest.mark.parametrize("op_type", [MX, BFP])
def test_special_values_stay_within_their_block(op_type: str) -> None:
    x = np.tile(np.array([1.0, -0.0, 1e-45, -1e-40, 0.5, 2.0, -3.0, 0.25], np.float32), (1, 8))
    x[0, 3], x[0, 40] = np.nan, -np.inf
    result = _run(BadNode(op_type, (), {"block_size": 32}, (x,)))
    calm = _run(BadNode(op_type, (), {"block_size": 32}, (np.nan_to_num(x, nan=0.0, neginf=0.0),)))
    assert not np.isfinite(result[0, 3])
    assert not np.isfinite(result[0, 40])
    assert np.isfinite(calm).all()
