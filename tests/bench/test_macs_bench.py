"""Multiply-accumulates of a file, and which of them have two 8-bit operands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from bench.macs import count_macs
from onnx import TensorProto, helper, numpy_helper


def save(path: Path, nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], shape: list[str | int]) -> Path:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, path)
    return path


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    ("node", "weight", "sample", "expected"),
    [
        (helper.make_node("Conv", ["x", "w"], ["y"]), ones(8, 3, 3, 3), ones(2, 3, 6, 5), 2 * 8 * 4 * 3 * 27),
        (helper.make_node("Conv", ["x", "w"], ["y"], group=4), ones(4, 1, 1, 1), ones(1, 4, 6, 5), 4 * 30),
        (
            helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2]),
            ones(3, 5, 2, 2),
            ones(1, 3, 4, 4),
            3 * 16 * 5 * 4,
        ),
        (helper.make_node("MatMul", ["x", "w"], ["y"]), ones(7, 5), ones(2, 3, 7), 2 * 3 * 7 * 5),
        (helper.make_node("Gemm", ["x", "w"], ["y"], transB=1), ones(5, 7), ones(3, 7), 3 * 7 * 5),
        (helper.make_node("Gemm", ["x", "w"], ["y"], transA=1), ones(7, 5), ones(7, 3), 3 * 7 * 5),
    ],
)
def test_products_are_counted_by_the_shapes_of_a_run(
    tmp_path: Path, node: onnx.NodeProto, weight: np.ndarray, sample: np.ndarray, expected: int
) -> None:
    free = [f"d{axis}" for axis in range(sample.ndim)]
    macs = count_macs(save(tmp_path / "net.onnx", [node], {"w": weight}, free), {"x": sample})
    assert (macs.total, macs.eight_bit, macs.by_operator) == (expected, 0, {node.op_type: expected})


def quantized(name: str, scale: str, zero_point: str) -> list[onnx.NodeProto]:
    return [
        helper.make_node("QuantizeLinear", [name, scale, zero_point], [f"{name}_q"]),
        helper.make_node("DequantizeLinear", [f"{name}_q", scale, zero_point], [f"{name}_dq"]),
    ]


@pytest.mark.parametrize(
    ("activation", "weight", "second_scale", "percent"),
    [
        (np.uint8, np.int8, 1.0, 100),
        (np.int8, np.int8, 1.0, 100),
        (np.uint16, np.int8, 1.0, 0),
        (np.uint8, np.int16, 1.0, 0),
        (np.uint8, np.int8, 2.0, 0),  # a Concat of two scales is not a tensor of 8-bit integers
    ],
)
def test_both_operands_must_be_eight_bit_integers(
    tmp_path: Path, activation: type, weight: type, second_scale: float, percent: int
) -> None:
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], axis=1, num_outputs=2),
        *quantized("a", "one", "zero"),
        *quantized("b", "other", "zero"),
        helper.make_node("Concat", ["a_dq", "b_dq"], ["joined"], axis=1),
        helper.make_node("DequantizeLinear", ["w", "one"], ["w_dq"]),
        helper.make_node("Transpose", ["w_dq"], ["w_t"]),
        helper.make_node("MatMul", ["joined", "w_t"], ["y"]),
    ]
    constants = {
        "one": np.float32(1),
        "other": np.float32(second_scale),
        "zero": np.array(0, activation),
        "w": np.ones((3, 4), weight),
    }
    macs = count_macs(save(tmp_path / "net.onnx", nodes, constants, [2, 4]), {"x": ones(2, 4)})
    assert (macs.total, macs.eight_bit_percent) == (24, percent)


def test_integer_operators_count_and_a_file_without_products_has_no_share(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["y"], to=TensorProto.FLOAT),
    ]
    macs = count_macs(save(tmp_path / "a.onnx", nodes, {"w": np.ones((4, 3), np.int8)}, [2, 4]), {"x": ones(2, 4)})
    assert macs.eight_bit == macs.total == 24
    relu = save(tmp_path / "b.onnx", [helper.make_node("Relu", ["x"], ["y"])], {}, [2, 4])
    assert count_macs(relu, {"x": ones(2, 4)}).eight_bit_percent is None
