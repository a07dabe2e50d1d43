"""`read_plan` gives back what `insert` wrote, and reads files that other tools wrote."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from npu_models import npu_file
from odd_collection import calibration_of, made
from onnx import TensorProto, helper
from onnx_models import Net, transformer_block
from same_bytes import is_finetuned

from quark.demo import network_path
from quark.errors import ModelError
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.formats.spec import ScaleRule
from quark.onnx import QuantFormat, get_default_config, quantize, read_plan
from quark.onnx.insert import insert
from quark.onnx.plan_reader import ALL_IN_FLOAT, WEIGHT_IN_FLOAT
from quark.onnx.quantization.presets import PRESETS
from quark.plan import (
    AffineChoice,
    BlockChoice,
    DynamicChoice,
    FloatChoice,
    QuantizationPlan,
    Reader,
    Role,
    SkippedNode,
    TensorChoice,
)

# Presets that finetune change numbers of weights only: the files have the structures of the preset they start from.
USED_PRESETS = [name for name in PRESETS if not is_finetuned(name)]
NETWORKS = ("demo", "wiring", "shared_weights", "half", "many_outputs", "attention")
LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def quantized(network: str, config):
    if network == "demo":
        return quantize(network_path(), np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32), config)
    return quantize(made(network), calibration_of(network)[-3:], config)


def config_of(preset: str, **options):
    config = get_default_config(preset)
    config.extra_options.update(options)
    return config


def by_reader(plan: QuantizationPlan):
    rows = [((reader.node, reader.index), tensor) for tensor in plan for reader in tensor.readers]
    assert len(dict(rows)) == len(rows), "an input reads one tensor in one way"
    return dict(rows)


def as_stored(planned, read):
    """The planned choice with what the file cannot say taken from the one that was read: scales are stored in float32
    or float16, and weights in float16 or bfloat16 are rounded, whether or not that saturated. MatMulNBits and
    MatMulInteger do not say that a Gemm read its weight transposed."""
    if isinstance(planned, AffineChoice) and isinstance(read, AffineChoice) and planned.axis == 1 and read.axis == 0:
        for count in range(1, len(planned.scale) + 1 if planned.group_size else 1):
            if len(planned.scale) % count == 0:
                both = planned.scale, planned.zero_point
                scale, zero_point = (np.array(each).reshape(count, -1).T.ravel() for each in both)
                if np.array_equal(scale.astype(np.float32), np.array(read.scale)):
                    return replace(read, zero_point=tuple(zero_point.tolist()))
    if isinstance(planned, AffineChoice) and isinstance(read, AffineChoice):
        for dtype in (np.float32, np.float16):
            scale = tuple(np.array(planned.scale, dtype).tolist())
            if scale == read.scale:
                axis = planned.axis if planned.group_size or planned.axis != 0 else read.axis
                return replace(planned, scale=scale, axis=axis)
    if isinstance(planned, FloatChoice) and isinstance(read, FloatChoice):
        scale = tuple(np.array(planned.scale, np.float16).tolist())  # beside float16 data
        scale = scale if planned.is_eight_bits and scale == read.scale else planned.scale
        return replace(planned, is_saturating=read.is_saturating, scale=scale)
    return planned


def assert_same(planned: QuantizationPlan, read: QuantizationPlan, *, lost_names: bool = False) -> None:
    expected, found = by_reader(planned), by_reader(read)
    assert found.keys() == expected.keys()
    for reader, each in expected.items():
        other = found[reader]
        assert (other.role, other.choice) == (each.role, as_stored(each.choice, other.choice)), reader
        assert lost_names or other.tensor == each.tensor, reader
    assert all(each.reason == "" for each in read)


def layers_in_float(plan: QuantizationPlan) -> set[str]:
    return {node.node for node in plan.skipped if node.op_type in LAYERS}


def presets_of_networks() -> list[Any]:
    """Every preset on the first network and on one of the others in turn; the remaining pairs are slow tests."""
    turns = itertools.cycle(NETWORKS[1:])
    quick = {
        (network, preset) for turn, preset in zip(turns, USED_PRESETS, strict=False) for network in (NETWORKS[0], turn)
    }
    pairs = itertools.product(NETWORKS, USED_PRESETS)
    return [pytest.param(*pair, marks=[] if pair in quick else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("network", "preset"), presets_of_networks())
def test_every_preset_gives_its_plan_back(network, preset):
    result = quantized(network, preset)
    read = read_plan(result.model)
    # a layer that is replaced by ConvInteger or MatMulInteger does not keep the name of its result
    assert_same(result.plan, read, lost_names=preset == "UINT8_DYNAMIC_QUANT")
    assert layers_in_float(read) == layers_in_float(result.plan)


@pytest.mark.parametrize("network", ["demo", "wiring", "attention"])
@pytest.mark.parametrize(("preset", "options"), [
    ("A8W8", {"AddQDQPairToWeight": True}),
    ("A8W8", {"DedicatedQDQPair": True}),
    ("BF16", {"BF16QDQToCast": True}),
    ("BF16", {"BF16QDQToCast": True, "BF16WithClip": True}),
    ("MATMUL_NBITS", {"MatMulNBitsParams": {"GroupSize": 16, "Symmetric": False, "Bits": 4, "AccuracyLevel": 1}}),
    ("MATMUL_NBITS", {"MatMulNBitsParams": {"GroupSize": 32, "Symmetric": True, "Bits": 8, "AccuracyLevel": 1}}),
])  # fmt: skip
def test_every_way_to_write_it(network, preset, options):
    result = quantized(network, config_of(preset, **options))
    assert_same(result.plan, read_plan(result.model))


def test_a_clip_before_a_cast_saturates():
    result = quantized("demo", config_of("BF16", BF16QDQToCast=True, BF16WithClip=True))
    activations = [tensor.choice for tensor in read_plan(result.model) if tensor.role is Role.ACTIVATION]
    assert set(activations) == {FloatChoice("bfloat16", is_saturating=True)}


@pytest.mark.parametrize("network", ["demo", "wiring", "attention"])
def test_operators_on_codes(network):
    """Codes that go from one moving operator to the next have no scale, so nothing has the name of their tensor."""
    config = config_of("U8S8_AAWS", Protect="none")
    config.quant_format = QuantFormat.QOperator
    result = quantized(network, config)
    assert any(node.op_type.startswith("QLinear") for node in result.model.graph.node)
    assert_same(result.plan, read_plan(result.model), lost_names=network == "attention")


def test_dynamic_weights_have_the_orientation_of_the_file():
    """MatMulInteger holds the transposed weight of a Gemm with transB: channels are columns there."""
    config = get_default_config("UINT8_DYNAMIC_QUANT")
    config.per_channel = True
    result = quantized("demo", config)
    planned, read = by_reader(result.plan)["classifier", 1].choice, by_reader(read_plan(result.model))["classifier", 1]
    assert (planned.axis, read.choice.axis) == (0, 1)
    assert (
        read.choice.scale == as_stored(planned, AffineChoice("uint8", read.choice.scale, planned.zero_point, 0)).scale
    )
    assert read.choice.zero_point == planned.zero_point
    assert by_reader(read_plan(result.model))["classifier", 0].choice == DynamicChoice("uint8")


@pytest.mark.parametrize("pack", ["portable", "custom", "native"])
def test_a_packed_file_has_the_same_plan(pack, tmp_path):
    result = quantized("demo", "MXFP4E2M1")
    assert_same(result.plan, read_plan(result.save(tmp_path / "packed.onnx", pack=pack)))


def test_a_plan_that_was_read_makes_the_same_file_again():
    net = Net()
    hidden = net.node("Relu", net.conv(net.input("x", (1, 32, 8, 8)), (32, 4)), name="relu")
    output = net.conv(net.node("Sigmoid", hidden, name="sigmoid"), (4, 2))
    network = ir.from_proto(onnx.shape_inference.infer_shapes(net.model(output)))
    first, second = (node for node in network.graph if node.op_type == "Conv")
    blocks = BlockChoice(BlockQuantizer(get_format("mxfp6_e3m2"), ScaleRule.CEIL), 1)
    rows = [
        (first, 0, Role.ACTIVATION, blocks),
        (first, 1, Role.WEIGHT, blocks),
        (second, 0, Role.ACTIVATION, AffineChoice("uint16", (0.25,), (7,))),
        (second, 1, Role.WEIGHT, AffineChoice("int8", (0.5, 0.25), (0, 0), 0)),
        (second, 2, Role.BIAS, AffineChoice("int32", (0.125, 0.0625), (0, 0), 0)),
    ]
    choices = [
        TensorChoice(node.inputs[i].name, role, choice, (Reader(node.name, i),)) for node, i, role, choice in rows
    ]
    small = FloatChoice("float16", scale=(2.0,))
    choices.append(TensorChoice("relu_out", Role.ACTIVATION, small, (Reader("sigmoid", 0),)))
    choices.append(TensorChoice(output, Role.ACTIVATION, AffineChoice("int8", (0.5,), (0,)), (Reader("", 0),)))
    texts = []
    plan = QuantizationPlan(tuple(choices))
    for _ in range(2):
        copy = network.clone()
        insert(copy, plan)
        texts.append(sorted(str(node) for node in copy.graph))
        read = read_plan(copy)
        assert_same(plan, read)
        plan = read
    assert texts[0] == texts[1]


def test_a_float_model_has_an_empty_plan_and_says_which_layers_it_has():
    plan = read_plan(transformer_block())
    assert plan.tensors == ()
    assert {node.reason for node in plan.skipped} == {ALL_IN_FLOAT}
    assert {node.op_type for node in plan.skipped} >= {"MatMul"}


def test_a_layer_whose_weight_stayed_in_float():
    net = Net()
    x = pair(net, net.input("x", (1, 4)), "x", np.int8)
    y = net.node("MatMul", x, net.weight(4, 2), name="layer")
    plan = read_plan(net.model(y))
    assert plan.skipped == (SkippedNode("layer", "MatMul", WEIGHT_IN_FLOAT),)
    assert by_reader(plan).keys() == {("layer", 0)}


def test_source_may_be_a_path_a_proto_bytes_or_a_graph(tmp_path):
    proto = npu_file()
    onnx.save(proto, tmp_path / "model.onnx")
    plan = read_plan(proto)
    assert plan.tensors
    for source in (
        tmp_path / "model.onnx",
        str(tmp_path / "model.onnx"),
        proto.SerializeToString(),
        ir.from_proto(proto),
    ):
        assert read_plan(source) == plan
    assert QuantizationPlan.from_json(plan.to_json()) == plan


def test_what_is_no_model_is_an_error(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"nonsense")
    with pytest.raises(ModelError):
        read_plan(tmp_path / "model.onnx")


# Files of other tools. AMD Quark quantizes weights and activations by the same nodes, and names as ONNX Runtime does.


def pair(net: Net, value: str, name: str, dtype, scale=0.5, zero_point=0, prefix: str = "", **attributes) -> str:
    """A pair of nodes under the names that ONNX Runtime's quantizer gives them."""
    parameters = [
        net.constant(np.asarray(scale, np.float32), f"{name}_scale"),
        net.constant(np.full(np.shape(scale), zero_point).astype(dtype), f"{name}_zero_point"),
    ]
    domain = "com.amd.quark" if prefix else ""
    if prefix:
        net.domains[domain] = 1
    for kind in ("QuantizeLinear", "DequantizeLinear"):
        output = f"{name}_{kind}_Output"
        value = net.node(
            f"{prefix}{kind}", value, *parameters, name=f"{name}_{kind}", output=output, domain=domain, **attributes
        )
    return value


def test_their_integers_with_float_weights_behind_pairs():
    net = Net()
    x = pair(net, net.input("x", (1, 3, 8, 8)), "x", np.uint8, 0.25, 128)
    w = pair(net, net.weight(4, 3, 1, 1, name="w"), "w", np.int8, [0.5, 0.25, 1, 2], axis=0)
    b = pair(net, net.weight(4, name="b"), "b", np.int8, 0.125)
    y = net.node("Conv", x, w, b, name="conv", output="y_QuantizeLinear_Input")
    out = pair(net, y, "y", np.uint8, 0.0625, 3)
    net.nodes[-1].output[0] = "y"
    assert out.startswith("y_")
    rows = by_reader(read_plan(net.model("y")))
    assert {key: (row.tensor, row.role, row.choice) for key, row in rows.items()} == {
        ("conv", 0): ("x", Role.ACTIVATION, AffineChoice("uint8", (0.25,), (128,))),
        ("conv", 1): ("w", Role.WEIGHT, AffineChoice("int8", (0.5, 0.25, 1.0, 2.0), (0,) * 4, 0)),
        ("conv", 2): ("b", Role.BIAS, AffineChoice("int8", (0.125,), (0,))),
        ("", 0): ("y", Role.ACTIVATION, AffineChoice("uint8", (0.0625,), (3,))),
    }


def test_their_small_floats_by_extended_operators():
    net = Net()
    x = pair(net, net.input("x", (1, 4)), "x", ml_dtypes.bfloat16, 1.0, prefix="Extended")
    w = pair(net, net.weight(4, 2, name="w"), "w", ml_dtypes.bfloat16, 1.0, prefix="Extended")
    y = net.node("MatMul", x, w, name="product")
    rows = by_reader(read_plan(net.model(y)))
    assert {key: (row.tensor, row.role) for key, row in rows.items()} == {
        ("product", 0): ("x", Role.ACTIVATION),
        ("product", 1): ("w", Role.WEIGHT),
    }
    assert {row.choice for row in rows.values()} == {FloatChoice("bfloat16")}


def test_their_wide_integers_by_extended_operators():
    net = Net()
    x = pair(net, net.input("x", (1, 4)), "x", np.int32, 2.0**-20, prefix="Extended")
    assert by_reader(read_plan(net.model(net.node("Relu", x, name="relu"))))["relu", 0].choice == AffineChoice(
        "int32", (2.0**-20,), (0,)
    )


def test_their_blocks_stand_on_float_weights():
    net = Net()
    net.domains["com.amd.quark"] = 1
    attributes = {"domain": "com.amd.quark", "element_dtype": "fp8_e4m3", "block_size": 16, "rounding_mode": 2}
    x = net.node("MXQuantizeDequantize", net.input("x", (1, 32)), axis=-1, **attributes)
    w = net.node("MXQuantizeDequantize", net.weight(32, 2, name="w"), axis=0, **attributes)
    rows = by_reader(read_plan(net.model(net.node("MatMul", x, w, name="product"))))
    assert [(row.tensor, row.role, row.choice.axis) for row in rows.values()] == [
        ("x", Role.ACTIVATION, -1),
        ("w", Role.WEIGHT, 0),
    ]
    for row in rows.values():
        assert isinstance(row.choice, BlockChoice)
        assert row.choice.quantizer.format == get_format("mxfp8_e4m3").with_block_size(16)


def test_onnx_runtimes_own_quantizer(tmp_path):
    """Its names are those that AMD Quark's quantizer, which is derived from it, writes."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Feeds(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            random = np.random.default_rng(0)
            self.feeds = iter([{"x": random.standard_normal((1, 3, 8, 8)).astype(np.float32)} for _ in range(3)])

        def get_next(self):
            return next(self.feeds, None)

    net = Net()
    hidden = net.node("Relu", net.conv(net.input("x", (1, 3, 8, 8)), (3, 4)), name="relu")
    onnx.save(onnx.shape_inference.infer_shapes(net.model(net.conv(hidden, (4, 2)))), tmp_path / "float.onnx")
    quantize_static(
        tmp_path / "float.onnx", tmp_path / "int8.onnx", Feeds(), per_channel=True, weight_type=QuantType.QInt8
    )
    plan, proto = read_plan(tmp_path / "int8.onnx"), onnx.load(tmp_path / "int8.onnx")
    convolutions = [node.name for node in onnx.load(tmp_path / "float.onnx").graph.node if node.op_type == "Conv"]
    rows = by_reader(plan)
    assert {(name, index) for name in convolutions for index in (0, 1, 2)} <= rows.keys()
    floats = {tensor.name for tensor in onnx.load(tmp_path / "float.onnx").graph.initializer}
    assert {tensor.tensor for tensor in plan if tensor.role is not Role.ACTIVATION} == floats
    assert {rows[name, 1].choice.axis for name in convolutions} == {0}
    assert {rows[name, 2].choice.format for name in convolutions} == {"int32"}
    assert rows["", 0].tensor == proto.graph.output[0].name
    assert plan.skipped == ()


def test_constants_may_be_nodes_and_nodes_nameless():
    graph = npu_file()
    for node in graph.graph.node:
        node.name = ""
    moved = [each for each in graph.graph.initializer if each.name.endswith(("_scale", "_zero_point"))]
    nodes = [helper.make_node("Constant", [], [each.name], value=each) for each in moved]
    nodes += graph.graph.node
    for each in moved:
        graph.graph.initializer.remove(each)
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    named = read_plan(npu_file())
    for plan in (read_plan(graph), read_plan(ir.from_proto(graph))):
        assert [(tensor.tensor, tensor.choice) for tensor in plan] == [(each.tensor, each.choice) for each in named]
        assert len(by_reader(plan)) == len(by_reader(named)) > 10


def test_shared_scales_name_no_tensor():
    """ONNX Runtime gives MaxPool's result the scale of its input, by name too."""
    net = Net()
    pooled = net.node(
        "MaxPool", pair(net, net.input("x", (1, 3, 8, 8)), "x", np.int8), kernel_shape=[2, 2], name="pool"
    )
    codes = net.node("QuantizeLinear", pooled, "x_scale", "x_zero_point")
    y = net.node("Relu", net.node("DequantizeLinear", codes, "x_scale", "x_zero_point"), name="relu")
    rows = by_reader(read_plan(net.model(y)))
    assert (rows["pool", 0].tensor, rows["relu", 0].tensor) == ("x", pooled)


def test_defaults_of_the_standard():
    """Without a zero point codes are uint8 of zero point 0, or what output_dtype says; the axis is 1."""
    net = Net(opset=21)
    x, scales = net.input("x", (1, 2, 4)), net.constant(np.array([0.5, 0.25], np.float32))
    plain = net.node("DequantizeLinear", net.node("QuantizeLinear", x, scales), scales)
    signed = net.node("QuantizeLinear", x, net.constant(2.0), output_dtype=TensorProto.INT16)
    signed = net.node("DequantizeLinear", signed, net.constant(2.0))
    rows = by_reader(read_plan(net.model(net.node("Add", plain, signed, name="add"))))
    assert rows["add", 0].choice == AffineChoice("uint8", (0.5, 0.25), (0, 0), 1)
    assert rows["add", 1].choice == AffineChoice("int16", (2.0,), (0,))


def test_scales_for_groups():
    net = Net(opset=21)
    codes = net.constant(np.zeros((8, 2), np.int8), "w_quantized")
    scales = net.constant(np.arange(1, 5, dtype=np.float32).reshape(2, 2))
    w = net.node("DequantizeLinear", codes, scales, axis=0, block_size=4)
    plan = read_plan(net.model(net.node("MatMul", net.input("x", (1, 8)), w, name="product")))
    assert by_reader(plan)["product", 1].choice == AffineChoice("int8", (1.0, 2.0, 3.0, 4.0), (0,) * 4, 0, 4)
    assert plan.of("w")[0].readers == (Reader("product", 1),)


def test_what_a_plan_cannot_say_is_an_error():
    net = Net(opset=21)
    x, scales = net.input("x", (1, 4)), net.constant(np.array([[0.5, 0.25]], np.float32))
    zeros = helper.make_tensor("zeros", TensorProto.FLOAT8E4M3FN, [1, 2], [0.0, 0.0])
    net.initializers.append(zeros)
    blocks = {"axis": 1, "block_size": 2}
    codes = net.node("QuantizeLinear", x, scales, "zeros", **blocks)
    y = net.node("DequantizeLinear", codes, scales, "zeros", **blocks)
    with pytest.raises(ModelError, match="fp8_e4m3 with scales for blocks fits no plan"):
        read_plan(net.model(y))


def test_float8_with_a_scale_for_each_channel_is_read_from_opset_19():
    net = Net(opset=19)
    x, scales = net.input("x", (1, 2)), net.constant(np.array([0.5, 0.25], np.float32))
    zeros = helper.make_tensor("zeros", TensorProto.FLOAT8E4M3FN, [2], [0.0, 0.0])
    net.initializers.append(zeros)
    y = net.node("DequantizeLinear", net.node("QuantizeLinear", x, scales, "zeros"), scales, "zeros")
    (row,) = read_plan(net.model(y)).tensors
    assert row.choice == FloatChoice("fp8_e4m3", is_saturating=True, scale=(0.5, 0.25), axis=1)


def test_a_block_operator_with_an_illegal_attribute_is_an_error():
    net = Net()
    net.domains["com.amd.quark"] = 1
    y = net.node("MXQuantizeDequantize", net.input("x", (1, 32)), name="bad", domain="com.amd.quark", block_size=0)
    with pytest.raises(ModelError, match="node 'bad'.*block_size"):
        read_plan(net.model(y))


@pytest.mark.parametrize("attributes", [{"output_dtype": 999}, {"axis": "first"}])
def test_a_damaged_node_is_an_error(attributes):
    net = Net(opset=21)
    scales = net.constant(np.array([0.5, 0.25], np.float32))
    codes = net.node("QuantizeLinear", net.input("x", (1, 2)), scales, name="bad", **attributes)
    model = ir.from_proto(net.model(net.node("DequantizeLinear", codes, scales)))
    with pytest.raises(ModelError, match="node 'bad'"):
        read_plan(model)
