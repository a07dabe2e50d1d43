"""What unpacking costs while a session is made: the nodes that go over a whole weight."""

import onnx
import pytest
from onnx import shape_inference
from packed_models import marked_model

from quark.onnx.large_tensors import Message
from quark.onnx.pack import pack_message

SHAPE = (16, 64, 3, 3)
COUNT = 16 * 64 * 9


def whole_weight_nodes(fmt):
    """The operators whose outputs have a number for each element, in order."""
    message, _ = pack_message(Message(marked_model(fmt, shapes=((SHAPE, 1),)), {}))
    inferred = shape_inference.infer_shapes(message.proto, data_prop=True)
    sizes = {}
    for value in inferred.graph.value_info:
        size = 1
        for dim in value.type.tensor_type.shape.dim:
            size *= dim.dim_value
        sizes[value.name] = size
    names = {"w0", *(name for name, size in sizes.items() if size == COUNT)}
    return [node.op_type for node in inferred.graph.node if not node.domain and names & set(node.output)]


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [
        ("mxfp4_e2m1", ["Gather", "Mul", "Reshape"]),
        ("mxfp6_e2m3", ["Gather", "Mul", "Reshape"]),
        ("mxint8", ["Cast", "Mul", "Reshape"]),
        ("mx9", ["Cast", "Gather", "Mul", "Transpose", "Reshape"]),
    ],
)
def test_few_nodes_go_over_the_whole_weight(fmt, expected):
    assert whole_weight_nodes(fmt) == expected


def test_unpacking_is_valid_onnx():
    message, _ = pack_message(Message(marked_model("mx6", shapes=((SHAPE, 1),)), {}))
    onnx.checker.check_model(message.filled(), full_check=True)
