"""What inserted nodes compute: exactly what the plan's numbers are, in every runtime, under the model's own names."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx_models import Net

from quark.errors import ModelError
from quark.formats import quantize_dequantize, quantize_dequantize_affine
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS, get_format
from quark.formats.spec import ScaleRule
from quark.onnx import get_library_path
from quark.onnx.insert import InsertOptions, NBitsOptions, insert
from quark.onnx.load import load
from quark.onnx.save import SaveOptions, to_proto
from quark.plan import (
    AffineChoice,
    BlockChoice,
    DynamicChoice,
    FloatChoice,
    QuantizationPlan,
    Reader,
    Role,
    TensorChoice,
)
from quark.rounded import parameters_of

RANDOM = np.random.default_rng(7)
SHAPE = (3, 40, 5)
X = (RANDOM.standard_normal(SHAPE) * 3).astype(np.float32)

ACTIVATIONS = [
    AffineChoice("int8", (0.05,), (0,)),
    AffineChoice("uint8", (0.03,), (77,)),
    AffineChoice("int16", (0.0003,), (0,)),
    AffineChoice("uint16", (0.0003,), (30000,)),
    AffineChoice("int32", (1e-6,), (0,)),
    AffineChoice("uint32", (1e-6,), (2**31,)),
    FloatChoice("float16"),
    FloatChoice("bfloat16"),
    *(BlockChoice(BlockQuantizer(fmt), 1) for fmt in BLOCK_FORMATS),
    BlockChoice(BlockQuantizer(get_format("mxfp6_e2m3"), ScaleRule.RCEIL), -1),
]


def expected(x, choice):
    if isinstance(choice, AffineChoice):
        return quantize_dequantize_affine(x, parameters_of(choice, x.shape))
    if isinstance(choice, FloatChoice):
        return quantize_dequantize(x, choice.format)
    quantizer = choice.quantizer
    return quantize_dequantize(x, quantizer.format, choice.axis, scale_rule=quantizer.scale_rule)


def relu_model(opset=17, dtype=np.float32):
    net = Net(opset, dtype=dtype)
    return net.model(net.node("Abs", net.node("Neg", net.input("x", SHAPE), name="neg"), name="abs", output="y"))


def carry_out(model, *choices, options=None, portable=False):
    graph = load(model).model
    insert(graph, QuantizationPlan(choices), options)
    return to_proto(graph, {}, SaveOptions(has_portable_functions=portable))


def run(proto, feed, has_library=True):
    session_options = onnxruntime.SessionOptions()
    session_options.log_severity_level = 4
    session_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if has_library:
        session_options.register_custom_ops_library(get_library_path())
    session = onnxruntime.InferenceSession(proto.SerializeToString(), session_options, ["CPUExecutionProvider"])
    return session.run(None, feed)[0]


def activation(tensor, choice, *readers):
    return TensorChoice(tensor, Role.ACTIVATION, choice, tuple(readers))


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("choice", ACTIVATIONS, ids=str)
def test_an_activation_becomes_the_numbers_of_its_choice(choice, opset):
    proto = carry_out(relu_model(opset), activation("x", choice, Reader("neg", 0)))
    np.testing.assert_array_equal(run(proto, {"x": X}), np.abs(expected(X, choice)))


@pytest.mark.parametrize("choice", ACTIVATIONS[:2] + ACTIVATIONS[6:9], ids=str)
def test_a_float16_model_keeps_its_type(choice):
    proto = carry_out(relu_model(21, np.float16), activation("x", choice, Reader("neg", 0)))
    result = run(proto, {"x": X.astype(np.float16)})
    assert result.dtype == np.float16
    np.testing.assert_allclose(result, np.abs(expected(X.astype(np.float16), choice)), rtol=2e-3, atol=0.06)


@pytest.mark.parametrize("choice", [ACTIVATIONS[4], *ACTIVATIONS[6:]], ids=str)
def test_portable_functions_make_the_same_file_run_without_the_library(choice):
    proto = carry_out(relu_model(), activation("x", choice, Reader("neg", 0)), portable=True)
    np.testing.assert_array_equal(run(proto, {"x": X}, has_library=False), run(proto, {"x": X}))


@pytest.mark.parametrize("is_saturating", [False, True])
def test_casts_instead_of_operators(is_saturating):
    choice = FloatChoice("float16", is_saturating)
    options = InsertOptions(has_casts=True)
    proto = carry_out(relu_model(), activation("x", choice, Reader("neg", 0)), options=options)
    assert {node.domain for node in proto.graph.node} == {""}
    x = X.copy()
    x[0, 0, 0] = 1e6
    assert np.isinf(run(proto, {"x": x})[0, 0, 0]) == (not is_saturating)


def test_a_quantized_output_keeps_its_name_and_the_rest_reads_what_it_did():
    choice = AffineChoice("uint8", (0.03,), (0,))
    proto = carry_out(relu_model(), activation("y", choice, Reader("", 0)))
    assert [output.name for output in proto.graph.output] == ["y"]
    np.testing.assert_array_equal(run(proto, {"x": X}), expected(np.abs(X), choice))


def test_dedicated_pairs_give_every_reader_its_own():
    net = Net()
    x = net.input("x", SHAPE)
    model = net.model(net.node("Add", x, x, name="add", output="y"))
    each = activation("x", ACTIVATIONS[0], Reader("add", 0), Reader("add", 1))
    shared, own = carry_out(model, each), carry_out(model, each, options=InsertOptions(has_dedicated_pairs=True))
    counts = [sum(node.op_type == "QuantizeLinear" for node in proto.graph.node) for proto in (shared, own)]
    assert counts == [1, 2]
    np.testing.assert_array_equal(run(shared, {"x": X}), run(own, {"x": X}))


WEIGHT = (RANDOM.standard_normal((40, 6))).astype(np.float32)
WEIGHTS = [
    AffineChoice("int8", (0.02,), (0,)),
    AffineChoice("uint8", (0.02,), (120,)),
    AffineChoice("int8", tuple(np.linspace(0.01, 0.06, 6).tolist()), (0,) * 6, axis=1),
    AffineChoice("int16", (0.0001,), (0,)),
    AffineChoice("int4", (0.4,), (0,)),
    FloatChoice("bfloat16"),
    *(BlockChoice(BlockQuantizer(fmt), 0) for fmt in BLOCK_FORMATS),
    BlockChoice(BlockQuantizer(get_format("mxfp4_e2m1"), ScaleRule.MSE), 0),
]


def product_model(opset=17):
    net = Net(opset)
    return net.model(net.node("MatMul", net.input("x", (5, 40)), net.constant(WEIGHT, "w"), name="product", output="y"))


@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("choice", WEIGHTS, ids=str)
def test_a_weight_becomes_the_numbers_of_its_choice(choice, opset):
    proto = carry_out(product_model(opset), TensorChoice("w", Role.WEIGHT, choice, (Reader("product", 1),)))
    identity = np.eye(40, dtype=np.float32)[:5]
    np.testing.assert_array_equal(run(proto, {"x": identity}), expected(WEIGHT, choice)[:5])
    assert "w" not in {tensor.name for tensor in proto.graph.initializer}


@pytest.mark.parametrize("choice", WEIGHTS[:3], ids=str)
def test_pairs_on_weights_give_the_same_result(choice):
    each = TensorChoice("w", Role.WEIGHT, choice, (Reader("product", 1),))
    x = RANDOM.standard_normal((5, 40)).astype(np.float32)
    plain, pairs = (
        carry_out(product_model(), each, options=InsertOptions(has_pairs_on_weights=flag)) for flag in (False, True)
    )
    assert "w" in {tensor.name for tensor in pairs.graph.initializer}
    np.testing.assert_array_equal(run(plain, {"x": x}), run(pairs, {"x": x}))


def test_a_block_weight_costs_nothing_at_run_time(tmp_path):
    choice = BlockChoice(BlockQuantizer(get_format("mxfp4_e2m1")), 0)
    proto = carry_out(product_model(), TensorChoice("w", Role.WEIGHT, choice, (Reader("product", 1),)))
    (mark,) = [node for node in proto.graph.node if node.op_type == "MXQuantizeDequantize"]
    assert {a.name for a in mark.attribute} >= {"element_dtype", "axis", "block_size"}
    session_options = onnxruntime.SessionOptions()
    session_options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    onnxruntime.InferenceSession(proto.SerializeToString(), session_options, ["CPUExecutionProvider"])
    import onnx

    assert [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node] == ["MatMul"]


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_matmul_nbits_multiplies_by_the_grouped_weight(bits, is_symmetric):
    fmt = f"{'' if is_symmetric else 'u'}int{bits}"
    step = 6.0 / 2**bits
    scales = tuple(step * (1 + 0.1 * i) for i in range(18))
    zero = 0 if is_symmetric else 2 ** (bits - 1) - 1
    choice = AffineChoice(fmt, scales, (zero,) * 18, axis=0, group_size=16)
    options = InsertOptions(matmul_nbits=NBitsOptions(bits, 16, is_symmetric))
    proto = carry_out(product_model(), TensorChoice("w", Role.WEIGHT, choice, (Reader("product", 1),)), options=options)
    assert "MatMulNBits" in [node.op_type for node in proto.graph.node]
    x = RANDOM.standard_normal((5, 40)).astype(np.float32)
    np.testing.assert_allclose(run(proto, {"x": x}), x @ expected(WEIGHT, choice), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op_type", ["MatMul", "Gemm", "Gemm turned", "Conv"])
def test_dynamic_quantization_is_close_and_integer(op_type):
    net = Net()
    if op_type == "Conv":
        x = net.input("x", (2, 3, 8, 8))
        net.node("Conv", x, net.weight(4, 3, 3, 3, name="w"), net.weight(4), name="n", output="y", pads=[1] * 4)
    else:
        x = net.input("x", (5, 12))
        is_turned = op_type == "Gemm turned"
        weight = net.weight(*((7, 12) if is_turned else (12, 7)), name="w")
        if op_type == "MatMul":
            net.node("MatMul", x, weight, name="n", output="y")
        else:
            net.node("Gemm", x, weight, net.weight(7), name="n", output="y", transB=int(is_turned), alpha=0.5, beta=2.0)
    model = net.model("y")
    choices = (
        activation("x", DynamicChoice("uint8"), Reader("n", 0)),
        TensorChoice("w", Role.WEIGHT, AffineChoice("uint8", (0.02,), (128,)), (Reader("n", 1),)),
    )
    proto = carry_out(model, *choices)
    op_types = [node.op_type for node in proto.graph.node]
    assert ("ConvInteger" if op_type == "Conv" else "MatMulInteger") in op_types
    feed = {"x": RANDOM.standard_normal([d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim])}
    feed = {"x": feed["x"].astype(np.float32)}
    reference, actual = run(model, feed), run(proto, feed)
    assert np.abs(actual - reference).max() < 0.05 * np.abs(reference).max()


@pytest.mark.parametrize(
    ("each", "message"),
    [
        (activation("missing", ACTIVATIONS[0], Reader("neg", 0)), "'missing'"),
        (activation("x", ACTIVATIONS[0], Reader("nobody", 0)), "'nobody'"),
        (activation("x", ACTIVATIONS[0], Reader("abs", 0)), "'abs'"),
        (activation("x", ACTIVATIONS[0], Reader("", 3)), "output 3"),
        (TensorChoice("x", Role.WEIGHT, ACTIVATIONS[0], (Reader("neg", 0),)), "not a constant"),
    ],
)
def test_a_plan_for_another_model_is_refused(each, message):
    with pytest.raises(ModelError, match=message):
        carry_out(relu_model(), each)
