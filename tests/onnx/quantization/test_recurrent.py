"""Recurrent networks and embeddings: weights are quantized, the rest computes what it did, and files get smaller."""

from __future__ import annotations

import os

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx_models import Net
from onnxruntime.quantization import quantize_dynamic

from quark.formats import quantize_dequantize_affine
from quark.onnx import get_default_config, quantize
from quark.onnx.pack import pack_model
from quark.onnx.plan_reader import read_plan
from quark.plan import AffineChoice, BlockChoice, DynamicChoice, Role
from quark.rounded import block_values, parameters_of

STEPS, BATCH, INPUT, HIDDEN = 6, 2, 32, 24
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
RANDOM = np.random.default_rng(3)
X = [{"x": RANDOM.standard_normal((STEPS, BATCH, INPUT)).astype(np.float32)} for _ in range(4)]
IDS = [{"ids": RANDOM.integers(0, 512, (1, 9))} for _ in range(4)]


def recurrent(op_type: str, directions: int = 1, *, layers: int = 1, is_full: bool = False, **attributes: object):
    """Layers of one kind on the same data with the same weights; `is_full`: with every optional input."""
    net = Net()
    x, gates = net.input("x", (STEPS, BATCH, INPUT)), GATES[op_type] * HIDDEN
    inputs = [net.weight(directions, gates, INPUT, name="w"), net.weight(directions, gates, HIDDEN, name="r")]
    if is_full:
        state = net.weight(directions, BATCH, HIDDEN)
        inputs += [net.weight(directions, 2 * gates), net.constant(np.array([STEPS, 3], np.int32)), state]
        inputs += [state, net.weight(directions, 3 * HIDDEN)] if op_type == "LSTM" else []
    direction = "bidirectional" if directions == 2 else "forward"
    results = []
    for layer in range(layers):
        names = {"name": f"layer{layer}", "outputs": [f"y{layer}", f"h{layer}"]}
        results += net.nodes_of(op_type, x, *inputs, hidden_size=HIDDEN, direction=direction, **names, **attributes)
    return net.model(*results)


def language_model(is_tied: bool, kind: str = "LSTM"):
    """An embedding, a recurrent layer and a projection, which has the table of the embedding as its weight if tied."""
    net = Net()
    table = net.weight(512, 64, name="table")
    rows = net.node("Gather", table, net.input("ids", (1, 9), np.int64), name="embedding")
    rows = net.node("Transpose", rows, perm=[1, 0, 2])
    gates = GATES[kind] * 64
    y = net.node(kind, rows, net.weight(1, gates, 64), net.weight(1, gates, 64), name="layer", hidden_size=64)
    y = net.node("Squeeze", y, net.integers([1]))
    weight = net.node("Transpose", table, perm=[1, 0]) if is_tied else net.weight(64, 512)
    return net.model(net.node("MatMul", y, weight, name="projection"))


def run(model: onnx.ModelProto, feed) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feed)


def rounded(array, choice):
    if isinstance(choice, AffineChoice):
        return np.asarray(quantize_dequantize_affine(array, parameters_of(choice, array.shape)))
    return block_values(array, choice)


def with_rounded_weights(model, plan) -> onnx.ModelProto:
    """The float model, with the numbers that the plan makes of its weights."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for tensor in copy.graph.initializer:
        for each in plan.of(tensor.name):
            tensor.CopyFrom(numpy_helper.from_array(rounded(numpy_helper.to_array(tensor), each.choice), tensor.name))
    return copy


def in_words(plan) -> set[tuple[object, ...]]:
    return {(tensor.tensor, tensor.role, str(tensor.choice), frozenset(tensor.readers)) for tensor in plan}


def sqnr(expected, found) -> float:
    return float(10 * np.log10((expected**2).sum() / ((expected - found) ** 2).sum()))


def sizes(result, model, tmp_path) -> tuple[int, int]:
    """Bytes of the float file and of the quantized one."""
    onnx.save(model, tmp_path / "float.onnx")
    return os.path.getsize(tmp_path / "float.onnx"), os.path.getsize(result.save(tmp_path / "out.onnx"))


@pytest.mark.parametrize(("op_type", "preset"), [
    ("LSTM", "A8W8"), ("GRU", "A8W8"), ("RNN", "A8W8"), ("LSTM", "XINT8"), ("GRU", "INT8_TRANSFORMER_DEFAULT"),
    ("LSTM", "MXINT8"), ("GRU", "MXFP4E2M1"),
])  # fmt: skip
def test_static_presets_compute_with_rounded_weights(op_type, preset):
    model = recurrent(op_type, 2, is_full=True)
    result = quantize(model, X, preset)
    weights = {tensor.tensor: tensor.choice for tensor in result.plan if tensor.role is Role.WEIGHT}
    assert weights.keys() == {"w", "r"}
    assert {weight.axis for weight in weights.values()} == (
        {None} if preset == "XINT8" else {2 if "MX" in preset else 1}
    )
    feed, exact = X[0], with_rounded_weights(model, result.plan)
    data = [each.choice for each in result.plan.of("x")]
    assert all(isinstance(choice, BlockChoice) and choice.axis == -1 for choice in data)
    assert bool(data) == ("MX" in preset)  # integers would help nobody: the layer computes in float
    rounded_feed = {"x": rounded(feed["x"], data[0])} if data else feed
    for expected, found in zip(run(exact, rounded_feed), run(result.model, feed), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    assert in_words(read_plan(result.model)) == in_words(result.plan)


@pytest.mark.parametrize("directions", [1, 2])
def test_dynamic_lstm_is_the_kernel_of_onnx_runtime(directions):
    model = recurrent("LSTM", directions, is_full=True)
    result = quantize(model, X, "UINT8_DYNAMIC_QUANT")
    assert [(node.domain, node.op_type) for node in result.model.graph.node] == [
        ("com.microsoft", "DynamicQuantizeLSTM")
    ]
    for expected, found in zip(run(model, X[0]), run(result.model, X[0]), strict=True):
        assert sqnr(expected, found) > 32
    by_reader = {reader: tensor for tensor in read_plan(result.model) for reader in tensor.readers}
    for tensor in result.plan:
        other = by_reader[tensor.readers[0]]
        assert (other.tensor, other.role) == (tensor.tensor, tensor.role)
        if isinstance(tensor.choice, DynamicChoice):
            assert other.choice == tensor.choice
        else:
            assert (other.choice.format, other.choice.axis) == ("uint8", 1)
            assert set(other.choice.zero_point) == {128}
            np.testing.assert_allclose(other.choice.scale, tensor.choice.scale, rtol=1e-7)


def test_dynamic_gru_has_integer_weights():
    model = recurrent("GRU", 2, is_full=True, linear_before_reset=1)
    result = quantize(model, None, "UINT8_DYNAMIC_QUANT")
    assert [node.op_type for node in result.model.graph.node] == ["DequantizeLinear", "DequantizeLinear", "GRU"]
    assert {(tensor.choice.format, tensor.choice.axis) for tensor in result.plan} == {("uint8", 1)}
    exact = with_rounded_weights(model, result.plan)
    for expected, found in zip(run(exact, X[0]), run(result.model, X[0]), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("op_type", "preset"), [
    ("LSTM", "A8W8"), ("GRU", "A8W8"), ("LSTM", "UINT8_DYNAMIC_QUANT"), ("GRU", "UINT8_DYNAMIC_QUANT"),
])  # fmt: skip
def test_files_get_smaller_and_shared_weights_are_stored_once(op_type, preset, tmp_path):
    model = recurrent(op_type, layers=3)
    result = quantize(model, X, preset)
    count = GATES[op_type] * HIDDEN * (INPUT + HIDDEN)
    codes = [tensor for tensor in result.model.graph.initializer if np.prod(tensor.dims) > 4 * HIDDEN]
    assert (len(codes), sum(len(tensor.raw_data) for tensor in codes)) == (2, count)
    before, after = sizes(result, model, tmp_path)
    assert after < before


def test_blocks_of_recurrent_weights_are_packed(tmp_path):
    model = recurrent("LSTM", 2)
    packed = pack_model(quantize(model, X, "MXFP4E2M1").save(tmp_path / "out.onnx"), tmp_path / "packed.onnx")
    assert sorted(weight.name for weight in packed.packed) == ["r_mxfp4_e2m1", "w_mxfp4_e2m1"]
    found = run(onnx.load(tmp_path / "packed.onnx"), X[0])
    for one, other in zip(run(onnx.load(tmp_path / "out.onnx"), X[0]), found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_recurrent_layer_leaves_what_is_around_it_as_it_was():
    """Only the weights of the layer are integers: nothing that moves its data is quantized for it."""
    result = quantize(language_model(is_tied=False), IDS, "A8W8")
    tensors = {tensor.tensor for tensor in result.plan if tensor.role is Role.ACTIVATION}
    assert not tensors & {"embedding_out", "transpose1_out"}
    assert "operator type" not in " ".join(node.reason for node in result.plan.skipped)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_weights_that_an_exporter_assembles_are_constants_first(kind):
    net = Net()
    x, gates = net.input("x", (STEPS, BATCH, INPUT)), GATES[kind] * HIDDEN
    halves = [net.weight(gates, INPUT), net.weight(gates, HIDDEN)]
    parts = []
    for half in halves:
        bounds = [net.integers([0]), net.integers([HIDDEN]), net.integers([gates]), net.integers([0])]
        first = net.node("Slice", half, bounds[0], bounds[1], bounds[3])
        rest = net.node("Slice", half, bounds[1], bounds[2], bounds[3])
        parts.append(net.node("Unsqueeze", net.node("Concat", rest, first, axis=0), net.integers([0])))
    model = net.model(net.node(kind, x, *parts, name="layer", hidden_size=HIDDEN))
    result = quantize(model, X, "A8W8")
    assert sum(tensor.role is Role.WEIGHT for tensor in result.plan) == 2
    assert sqnr(run(model, X[0])[0], run(result.model, X[0])[0]) > 35


def test_the_kernel_takes_no_batches_first():
    """With layout 1, which ONNX Runtime does not run, the weights become integers behind DequantizeLinear."""
    config = get_default_config("UINT8_DYNAMIC_QUANT")
    config.extra_options["VerdictMemoryLimit"] = 0
    net = Net()
    x = net.input("x", (BATCH, STEPS, INPUT))
    weights = net.weight(1, 4 * HIDDEN, INPUT), net.weight(1, 4 * HIDDEN, HIDDEN)
    model = net.model(net.node("LSTM", x, *weights, name="layer", hidden_size=HIDDEN, layout=1))
    nodes = quantize(model, None, config).model.graph.node
    assert [node.op_type for node in nodes] == ["DequantizeLinear", "DequantizeLinear", "LSTM"]


def test_dynamic_embeddings_dequantize_the_rows_that_were_taken(tmp_path):
    model = language_model(is_tied=False, kind="GRU")
    result = quantize(model, IDS, "UINT8_DYNAMIC_QUANT")
    (table,) = result.plan.of("table")
    assert (table.choice.format, table.choice.axis, table.readers[0].node) == ("uint8", 1, "embedding")
    nodes = {node.name: node for node in result.model.graph.node}
    gather = nodes["embedding"]
    (dequantize,) = [node for node in nodes.values() if gather.output[0] in node.input]
    assert (gather.input[0], dequantize.op_type) == ("table_quantized", "DequantizeLinear")
    assert read_plan(result.model).of("table")[0].choice.axis == 1
    # what the network computes from rounded rows, with the product at run time excepted
    rows = rounded(numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == "table")), table.choice)
    inner = result.model
    inner.graph.output.append(onnx.helper.make_tensor_value_info(dequantize.output[0], onnx.TensorProto.FLOAT, None))
    np.testing.assert_allclose(run(inner, IDS[0])[-1], rows[IDS[0]["ids"]], rtol=1e-6)
    before, after = sizes(quantize(model, IDS, "UINT8_DYNAMIC_QUANT"), model, tmp_path)
    assert after < 0.32 * before


@pytest.mark.parametrize(
    ("preset", "share"), [("A8W8", 0.6), ("UINT8_DYNAMIC_QUANT", 0.6), ("FP16", 0.6), ("MXINT8", 1.1)]
)
def test_a_table_that_is_also_a_weight_is_not_stored_in_float_as_well(preset, share, tmp_path):
    model = language_model(is_tied=True)
    result = quantize(model, IDS, preset)
    before, after = sizes(result, model, tmp_path)
    assert after - 10_000 < share * before
    assert sqnr(run(model, IDS[0])[0], run(result.model, IDS[0])[0]) > 25
    large = [tensor for tensor in result.model.graph.initializer if np.prod(tensor.dims) >= 512 * 64]
    assert len(large) == (1 if preset in ("FP16", "MXINT8") else 2)  # integers have scales for channels of their own
    weights = [tensor for tensor in read_plan(result.model) if tensor.role is Role.WEIGHT]
    assert {reader.node for weight in weights for reader in weight.readers} == {"embedding", "layer", "projection"}


def test_tables_in_blocks_on_request():
    config = get_default_config("MXINT8")
    config.extra_options["QuantizeEmbeddings"] = True
    model = language_model(is_tied=False)
    result = quantize(model, IDS, config)
    (table,) = result.plan.of("table")
    assert (table.choice.format, table.choice.axis) == ("mxint8", 1)
    assert sqnr(run(model, IDS[0])[0], run(result.model, IDS[0])[0]) > 30


def test_an_excluded_projection_leaves_the_tied_table_in_float():
    config = get_default_config("MXINT8")
    config.nodes_to_exclude = ["projection"]
    plan = quantize(language_model(is_tied=True), IDS, config).plan
    assert not plan.of("table")


def test_a_recurrent_layer_that_is_named_is_quantized_as_a_whole():
    """As the NPU computes an LSTM; quark convert lstm-to-customlstm takes such files."""
    config = get_default_config("A16W8")
    config.extra_op_types_to_quantize = ["LSTM"]
    plan = quantize(recurrent("LSTM"), X, config).plan
    assert {tensor.tensor for tensor in plan} == {"x", "w", "r", "y0", "h0"}
    assert {str(tensor.choice) for tensor in plan} == {"int16"}


def test_files_of_onnx_runtimes_own_quantizer_are_read(tmp_path):
    model = language_model(is_tied=False)
    onnx.save(model, tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "theirs.onnx", per_channel=True)
    plan = read_plan(tmp_path / "theirs.onnx")
    weights = {
        (reader.node, reader.index): tensor.choice
        for tensor in plan
        for reader in tensor.readers
        if tensor.role is Role.WEIGHT
    }
    assert weights["embedding", 0].axis is None
    assert {weights["layer", index].axis for index in (1, 2)} == {1}
    assert DynamicChoice("uint8") in {tensor.choice for tensor in plan if tensor.readers[0].node == "layer"}
    # the same numbers as theirs, in the layout of LSTM
    w = numpy_helper.to_array(next(t for t in model.graph.initializer if t.dims == [1, 256, 64]))
    np.testing.assert_allclose(weights["layer", 1].scale, np.abs(w[0]).max(axis=1) / 127, rtol=0.02)
