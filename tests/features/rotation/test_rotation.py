"""Rotation: orthogonal matrices, folded into weights so that the float network computes the same."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import Net, run_model

from quark.errors import InvalidValueError, ModelError, UnknownNameError
from quark.features.rotation.matrices import (
    factors,
    fold_norm,
    hadamard,
    product,
    rotate_inputs,
    rotate_outputs,
    rotation,
)
from quark.features.rotation.options import RotatedPair, read_pairs
from quark.onnx import QuantizationConfig, quantize

SIZE = 16


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 16, 20, 24, 28, 36, 48, 64, 144, 896, 384, 576])
def test_hadamard_matrices_have_orthogonal_rows_of_signs(size):
    matrix = hadamard(size)
    assert set(np.unique(matrix)) <= {-1.0, 1.0}
    np.testing.assert_array_equal(matrix @ matrix.T, size * np.eye(size))


@pytest.mark.parametrize("size", [3, 6, 15, 18, 100])
def test_an_order_without_a_known_matrix_is_an_error(size):
    with pytest.raises(InvalidValueError, match=f"RMatrixDim = {size}"):
        hadamard(size)


def test_rotations_are_orthogonal_and_may_keep_the_mean():
    for matrix in (rotation(24), rotation(24, is_random=True), rotation(24, keeps_mean=True)):
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(24), atol=1e-12)
    np.testing.assert_allclose(rotation(24, keeps_mean=True).sum(axis=0), 1, atol=1e-12)
    assert not np.array_equal(rotation(24), rotation(24, is_random=True))
    assert np.abs(rotation(256, keeps_mean=True)).max() < 0.35  # spread out, not nearly the identity


@pytest.mark.parametrize("size", [6, 33, 100])
def test_orders_without_a_hadamard_matrix_are_rotated_all_the_same(size):
    for matrix in (rotation(size), rotation(size, is_random=True, seed=3), rotation(size, keeps_mean=True)):
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)
    assert np.abs(rotation(size)).max() <= (2 / size) ** 0.5 + 1e-12
    np.testing.assert_allclose(rotation(size, keeps_mean=True).sum(axis=0), 1, atol=1e-12)


@pytest.mark.parametrize("size", [32, 68, 1536, 11008])
def test_two_factors_are_an_orthogonal_matrix_and_far_smaller(size):
    left, right = factors(size)
    first = np.eye(1) if left is None else left
    assert len(first) * len(right) == size
    assert len(first) + len(right) < 300
    for value in (first, right):
        np.testing.assert_allclose(value @ value.T, np.eye(len(value)), atol=1e-12)
    x = np.random.default_rng(0).standard_normal(size)
    if size < 2000:
        np.testing.assert_allclose((first.T @ x.reshape(len(first), -1) @ right).ravel(), x @ product(left, right))


def test_layers_with_rotated_weights_compute_the_same():
    random = np.random.default_rng(0)
    x, first, second = (
        random.standard_normal((5, 12)),
        random.standard_normal((24, 12)),
        random.standard_normal((7, 24)),
    )
    bias, gain, shift = (random.standard_normal(size) for size in (24, 12, 12))
    matrix = rotation(8)  # in blocks
    weight, offset = fold_norm(first, bias, gain, shift)
    np.testing.assert_allclose(x @ weight.T + offset, (x * gain + shift) @ first.T + bias)
    weight, offset = rotate_outputs(first, bias, matrix)
    rotated_layer = (x @ weight.T + offset) @ rotate_inputs(second, matrix).T
    np.testing.assert_allclose(rotated_layer, (x @ first.T + bias) @ second.T)
    with pytest.raises(InvalidValueError, match="size 8 does not divide an axis of 12"):
        rotate_inputs(first, matrix)


def network(norm: str = "LayerNormalization"):
    """Two blocks on a stream that has outliers in one channel: Gemm, norm, MatMul, and a sum."""
    net = Net(seed=5)
    x = net.input("x", (4, 8))
    first = net.node("Gemm", x, net.weight(SIZE, 8), net.weight(SIZE), transB=1, name="embed")
    stream = first
    for block in ("one", "two"):
        scale, bias = net.constant(np.linspace(0.5, 2, SIZE, dtype=np.float32)), net.weight(SIZE)
        normal = net.node(norm, stream, scale, bias, axis=-1, name=f"{block}.norm")
        wide = net.node("Relu", net.node("MatMul", normal, net.weight(SIZE, 32), name=f"{block}.up"))
        down = net.node("MatMul", wide, net.weight(32, SIZE), name=f"{block}.down")
        stream = net.node("Add", net.node("Add", down, net.weight(SIZE)), stream)
    last = net.node("Gemm", stream, net.weight(SIZE, 5), net.weight(5), name="head", output="y")
    return net.model(last)


PAIRS = [
    {"prev_nodes": ["embed", "one.down"], "norm_node": "one.norm", "next_nodes": ["one.up"]},
    {"prev_nodes": ["two.down"], "norm_node": "two.norm", "next_nodes": ["two.up"]},
    {"prev_nodes": [], "next_nodes": ["head"]},
]


def rotated(tmp_path, pairs=PAIRS, model=None, **options):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"R1_pairs": pairs}))
    samples = [{"x": each} for each in np.random.default_rng(1).normal(size=(8, 4, 8)).astype(np.float32)]
    config = QuantizationConfig(include_rotation=True, print_summary=False)
    config.extra_options = {"RConfigPath": str(path), "RMatrixDim": SIZE, **options}
    return quantize(model or network(), samples, config), samples


def test_the_float_network_stays_the_same_and_the_report_names_the_nodes(tmp_path):
    result, samples = rotated(tmp_path, WeightsOnly=True, OpTypesToQuantize=["Conv"])
    (facts,) = (algorithm for algorithm in result.report.algorithms if algorithm.name == "rotation")
    assert facts.changed[0] == "embed: its output"
    assert len(facts.changed) == 6
    for sample in samples:
        expected, found = run_model(network(), sample)["y"], run_model(result.model, sample)["y"]
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    graph = ir.from_proto(result.model).graph
    (norm,) = (node for node in graph if node.name == "one.norm")
    np.testing.assert_array_equal(norm.inputs[1].const_value.numpy(), np.ones(SIZE, np.float32))


def test_a_random_rotation_and_quantization_work(tmp_path):
    result, _ = rotated(tmp_path, UseRandomHad=True)
    assert result.report.outputs[0].sqnr_db > 20


def test_a_bias_of_a_norm_goes_behind_the_product_and_outputs_keep_their_names(tmp_path):
    net = Net(seed=5)
    first = net.node("MatMul", net.input("x", (4, 8)), net.weight(8, SIZE), name="embed")
    normal = net.node("LayerNormalization", first, net.weight(SIZE), net.weight(SIZE), axis=-1, name="norm")
    model = net.model(net.node("MatMul", normal, net.weight(SIZE, 5), name="head", output="y"))
    pairs = [{"prev_nodes": ["embed"], "norm_node": "norm", "next_nodes": ["head"]}]
    result, samples = rotated(tmp_path, pairs, model, OpTypesToQuantize=["Conv"])
    assert [value.name for value in result.model.graph.output] == ["y"]
    expected, found = run_model(model, samples[0])["y"], run_model(result.model, samples[0])["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_pairs_that_are_not_whole_are_an_error_that_says_so(tmp_path):
    with pytest.raises(InvalidValueError, match="differs"):
        rotated(tmp_path, PAIRS[:2])
    net = Net(seed=5)
    first = net.node("MatMul", net.input("x", (4, 8)), net.weight(8, SIZE), name="embed")
    normal = net.node("LayerNormalization", first, net.weight(SIZE), net.weight(SIZE), axis=-1, name="norm")
    last = net.node("MatMul", normal, net.weight(SIZE, 5), name="head")
    indices = net.model(net.node("ArgMax", last, axis=-1))
    indices.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    whole = {"prev_nodes": ["embed"], "norm_node": "norm", "next_nodes": ["head"]}
    rotated(tmp_path, [whole], indices)
    with pytest.raises(InvalidValueError, match="differs"):
        rotated(tmp_path, [{"prev_nodes": ["embed"]}], indices)
    with pytest.raises(UnknownNameError, match="'embedd'"):
        rotated(tmp_path, [{"prev_nodes": ["embedd"]}])
    model = network()
    relu = next(node.name for node in model.graph.node if node.op_type == "Relu")
    with pytest.raises(ModelError, match=rf"'{relu}' \(Relu\) cannot be rotated"):
        rotated(tmp_path, [{"prev_nodes": [relu]}], model)
    for size in (8, 1 << 16):  # a matrix of 32 GiB is not made first
        with pytest.raises(ModelError, match=f"RMatrixDim is {size}"):
            rotated(tmp_path, RMatrixDim=size)


def test_the_file_is_read_with_care(tmp_path):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"R1_pairs": [{"prev_nodes": ["a"], "next_nodes": ["b"], "norm_node": None}]}))
    assert read_pairs(path) == (RotatedPair(("a",), ("b",)),)
    wrong: list[object] = [{}, {"R1_pairs": []}, {"R1_pairs": [{"prev_nodes": "a"}]}, {"R1_pairs": [3]}, []]
    wrong += [{"R1_pairs": [{"prev_nodes": ["a"], "norm_node": ""}]}]
    for content in wrong:
        path.write_text(json.dumps(content))
        with pytest.raises(InvalidValueError, match="rotation config"):
            read_pairs(path)
