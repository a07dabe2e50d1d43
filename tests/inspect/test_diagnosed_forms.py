"""Files of other tools and other forms, and the arithmetic that figures are made of."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx_models import Net, conv_bn_relu
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from tiny_models import SIZE, save_brightness_model

from quark.compare.measures import fast_pair_sums
from quark.errors import InvalidValueError
from quark.inspect.diagnose import diagnose
from quark.inspect.diagnose.equalized import LayerWeights, factors_by_weights
from quark.inspect.diagnose.files import read_side
from quark.inspect.diagnose.sensitivity import find_sensitivities
from quark.inspect.diagnose.sites import find_sites
from quark.onnx import quantize
from quark.onnx.pack import pack_model

SAMPLES = np.random.default_rng(0).normal(0.5, 1.0, (6, 3, SIZE, SIZE)).astype(np.float32)


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self) -> None:
        self._samples = iter([{"input": sample[None]} for sample in SAMPLES])

    def get_next(self):
        return next(self._samples, None)


@pytest.mark.parametrize("form", [QuantFormat.QDQ, QuantFormat.QOperator], ids=["pairs", "codes"])
def test_files_of_onnx_runtimes_quantizer(tmp_path, form):
    source = save_brightness_model(tmp_path / "float.onnx")
    target = tmp_path / "quantized.onnx"
    kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(source, target, _Reader(), quant_format=form, **kinds)
    assert "Relu" not in [node.op_type for node in onnx.load(target).graph.node]  # the quantizer does its work
    diagnosis = diagnose(source, target, SAMPLES, num_samples=4)
    assert {"conv", "gemm"} <= {layer.name.removesuffix("_quant") for layer in diagnosis.layers}
    assert all(layer.local.sqnr_db > 20 for layer in diagnosis.layers)
    text = "put back" if form is QuantFormat.QDQ else "on codes"
    assert any(text in remark for remark in diagnosis.remarks)
    convolution = next(layer for layer in diagnosis.layers if layer.name.startswith("conv"))
    assert (convolution.weights, convolution.inputs) == ("int8", "uint8")


def test_sums_are_those_of_float64():
    generator = np.random.default_rng(1)
    y = generator.normal(size=(3, 70_000)).astype(np.float32)
    z = y + generator.normal(0, 1e-3, y.shape).astype(np.float32)
    found, wide = fast_pair_sums(y, z), (z.astype(np.float64) - y)
    assert found.error == pytest.approx(np.square(wide).sum(), rel=1e-4)
    assert found.max_error == pytest.approx(np.abs(wide).max(), rel=1e-4)
    assert found.exact == pytest.approx(np.square(y, dtype=np.float64).sum(), rel=1e-5)


def test_sums_of_what_is_not_finite_or_large():
    y, z = np.ones(4, np.float32), np.array([1, np.nan, 1, 1], np.float32)
    assert fast_pair_sums(y, z).sqnr_db == -np.inf
    assert fast_pair_sums(z, y).error == 0  # where the float network has none there is nothing to compare
    large = np.full(4, 1e30, np.float32)
    assert fast_pair_sums(large, large * np.float32(1.1)).sqnr_db == pytest.approx(20, abs=0.1)


@pytest.mark.parametrize("groups", [1, 8])
def test_factors_are_found_again(groups):
    generator = np.random.default_rng(2)
    inputs, outputs = 2.0 ** generator.uniform(-2, 2, 16), 2.0 ** generator.uniform(-2, 2, 32)
    exact = generator.normal(size=(32, 16 // groups, 9)).astype(np.float32)
    plain = LayerWeights(exact, exact, groups)
    rescaled = exact * outputs[:, None, None] / plain.inputs_of(inputs)[:, :, None]
    step = np.abs(rescaled).max() / 127
    weights = LayerWeights((np.rint(rescaled / step) * step).astype(np.float32), exact, groups)
    found = factors_by_weights(weights, inputs)
    assert found is not None
    assert np.median(np.abs(found / outputs - 1)) < 0.02
    assert (factors_by_weights(plain, None) == 1).all()


HEADER = '<ir_version: 8, opset_import: ["": 17]>'
WIDTH = 32


def save_text(path, text, **weights):
    model = onnx.parser.parse_model(f"{HEADER} {text}")
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{number}"
    onnx.save(model, path)
    return path


def matrix(seed):
    return np.random.default_rng(seed).normal(0, 0.2, (WIDTH, WIDTH)).astype(np.float32)


def test_layers_count_by_any_output(tmp_path):
    """A layer behind one output moves the other one alone; a layer that both depend on moves both."""
    source = save_text(
        tmp_path / "float.onnx",
        f"g (float[n, {WIDTH}] x) => (float[n, {WIDTH}] y, float[n, {WIDTH}] z, float[n, {WIDTH}] v) "
        "{ t = MatMul (x, a)  y = Relu (t)  u = MatMul (y, b)  z = Relu (u)  w = MatMul (x, c)  v = Relu (w) }",
        a=matrix(1),
        b=matrix(2),
        c=matrix(3),
    )
    data = np.random.default_rng(0).normal(0, 1, (6, WIDTH)).astype(np.float32)
    target = quantize(source, data, "A8W8").save(tmp_path / "quantized.onnx")
    found = {layer.tensor: layer.sensitivity or 0.0 for layer in diagnose(source, target, data).layers}
    assert found["y"] > 0
    assert found["z"] > 0
    assert found["v"] > 0
    exact, other = read_side(source).model, read_side(target).model
    sites = find_sites(exact, other)
    samples = [{"x": row[None]} for row in data]
    chosen = find_sensitivities(exact, other, sites, {}, samples, tensors=["z"])
    assert chosen.values == {"z": pytest.approx(found["z"])}


def test_samples_of_different_lengths_and_shapes_computed_in_the_graph(tmp_path):
    """As transformers are exported: a dimension without axes goes from layer to layer, and samples differ in length."""
    source = save_text(
        tmp_path / "float.onnx",
        f"g (float[1, n, {WIDTH}] x) => (float[1, n, {WIDTH}] y) "
        "{ s = Shape (x)  one = Constant <value_int = 1> ()  length = Gather (s, one)"
        "  two = Constant <value_int = 2> ()  wide = Gather (s, two)"
        "  t = MatMul (x, a)  p = Relu (t)  u = MatMul (p, b)  q = Relu (u)  w = MatMul (q, c)"
        "  axes = Constant <value_ints = [0]> ()  rows = Unsqueeze (length, axes)"
        "  columns = Unsqueeze (wide, axes)  one_row = Constant <value_ints = [1]> ()"
        "  form = Concat <axis = 0> (one_row, rows, columns)  r = Reshape (w, form)  y = Tanh (r) }",
        a=matrix(1),
        b=matrix(2),
        c=matrix(3),
    )
    generator = np.random.default_rng(0)
    samples = [{"x": generator.normal(size=(1, length, WIDTH)).astype(np.float32)} for length in (5, 9, 3, 7, 4, 6)]
    target = quantize(source, samples, "A8W8").save(tmp_path / "quantized.onnx")
    exact, other = read_side(source).model, read_side(target).model
    sites = find_sites(exact, other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quark.inspect.diagnose.sensitivity.FEWEST_LAYERS", 1)  # cut between all layers
        sensitivities = find_sensitivities(exact, other, sites, {}, samples)
    assert sensitivities.values == {
        name: pytest.approx(value)
        for name, value in find_sensitivities(exact, other, sites, {}, samples).values.items()
    }
    assert all(value > 0 for value in sensitivities.values.values())
    assert diagnose(source, target, samples).basis.sensitivity_samples == 6


def test_factors_are_not_looked_for_along_axes_that_vary(tmp_path):
    """SmoothQuant leaves factors; a tensor whose channels are as many as a sample is long has none."""
    source = save_text(
        tmp_path / "float.onnx",
        f"g (float[1, {WIDTH}, n] x) => (float[1, m, {WIDTH}] y) "
        "{ h = Transpose <perm = [0, 2, 1]> (x)  t = MatMul (h, a)  s = Transpose <perm = [0, 2, 1]> (t)"
        "  e = Sigmoid (s)  d = Transpose <perm = [0, 2, 1]> (e)  y = MatMul (d, b) }",
        a=matrix(1),
        b=matrix(2),
    )
    generator = np.random.default_rng(0)
    samples = [{"x": generator.normal(size=(1, WIDTH, length)).astype(np.float32)} for length in (5, 9, 3, 7)]
    target = quantize(source, samples, "A8W8").save(tmp_path / "quantized.onnx")
    assert diagnose(source, target, samples).verdict.value == "ok"


def test_packed_weights_are_read_beside_branches(tmp_path):
    """A branch that captures a tensor does not make it a part of what a weight is computed from."""
    source = save_text(
        tmp_path / "float.onnx",
        f"g (float[n, {WIDTH}] x, bool c) => (float[n, {WIDTH}] y) "
        "{ t = MatMul (x, a)"
        f"  y = If (c) <then_branch = g1 () => (float[n, {WIDTH}] p) {{ p = Relu (t) }},"
        f" else_branch = g2 () => (float[n, {WIDTH}] q) {{ q = Neg (t) }}> }}",
        a=matrix(1),
    )
    rows = np.random.default_rng(0).normal(0, 1, (6, 1, WIDTH)).astype(np.float32)
    samples = [{"x": row, "c": np.array(True)} for row in rows]
    target = quantize(source, samples, "MXFP4E2M1").save(tmp_path / "quantized.onnx")
    pack_model(target, tmp_path / "packed.onnx", "portable")
    plain, packed = (diagnose(source, value, samples) for value in (target, tmp_path / "packed.onnx"))
    assert [layer.local for layer in packed.layers] == [layer.local for layer in plain.layers]


def test_products_of_few_bits_keep_the_names_of_tensors(tmp_path):
    source = save_text(
        tmp_path / "float.onnx",
        f"g (float[n, {WIDTH}] x) => (float[n, {WIDTH}] y) {{ t = MatMul (x, a)  u = MatMul (t, b)  y = Relu (u) }}",
        a=matrix(1),
        b=matrix(2),
    )
    data = np.random.default_rng(0).normal(0, 1, (6, WIDTH)).astype(np.float32)
    target = quantize(source, data, "MATMUL_NBITS").save(tmp_path / "quantized.onnx")
    assert [layer.tensor for layer in diagnose(source, target, data).layers] == ["t", "y"]


def test_a_file_with_nothing_quantized_is_called_that(tmp_path):
    source = save_text(tmp_path / "float.onnx", "g (float[n, 4] x) => (float[n, 4] y) { y = Exp (x) }")
    with pytest.raises(InvalidValueError, match="nothing in it is quantized"):
        diagnose(source, source, np.ones((2, 4), np.float32))


def test_files_that_are_quantized_dynamically_are_called_that(tmp_path):
    source = save_brightness_model(tmp_path / "float.onnx")
    target = quantize(source, SAMPLES, "UINT8_DYNAMIC_QUANT").save(tmp_path / "quantized.onnx")
    with pytest.raises(InvalidValueError, match="quantized dynamically"):
        diagnose(source, target, SAMPLES)


def test_an_output_that_another_layer_reads_has_its_histogram(tmp_path):
    """The quantized tensor keeps the name of the output, which the network that is cut there is given, too."""
    net = Net()
    x = net.input("x", (1, 3, 8, 8))
    y = net.node("Relu", net.conv(x, (3, 4)), name="relu", output="y")
    z = net.conv(y, (4, 2))
    model = net.model(y, z)
    onnx.save(model, tmp_path / "float.onnx")
    samples = np.random.default_rng(0).normal(size=(8, 1, 3, 8, 8)).astype(np.float32)
    path = quantize(model, list(samples)).save(tmp_path / "quantized.onnx")
    diagnosis = diagnose(tmp_path / "float.onnx", path, list(samples))
    picture = next(layer for layer in diagnosis.layers if layer.tensor == z).input_histogram
    assert picture is not None
    assert picture.quantized is not None
    assert sum(picture.counts) == sum(picture.quantized) > 0
    assert picture.counts != picture.quantized  # the rounded values, and not the float ones that were given


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16], ids=["float16", "float64", "bfloat16"])
def test_a_network_of_other_floats_is_compared_with_its_quantized_form(tmp_path, dtype):
    """The quantized layers are of float32. ONNX Runtime runs no layers of float64 or bfloat16."""
    model = conv_bn_relu(dtype=dtype, batch="n")
    onnx.save(model, tmp_path / "float.onnx")
    given = np.float32 if dtype == ml_dtypes.bfloat16 else dtype
    samples = [np.random.default_rng(seed).normal(size=(1, 3, 8, 8)).astype(given) for seed in range(8)]
    path = quantize(model, samples).save(tmp_path / "quantized.onnx")
    diagnosis = diagnose(tmp_path / "float.onnx", path, samples)
    layer = next(layer for layer in diagnosis.layers if layer.op_type == "Conv")
    assert layer.local is not None
    assert 20 < layer.local.sqnr_db < 100
    assert any("converted to float32" in remark for remark in diagnosis.remarks) == (dtype != np.float16)
