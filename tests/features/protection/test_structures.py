"""Structures that 8 bits are known to break are recognised by their form, and nothing else is touched."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_models import Net, conv_bn_relu, gelu_erf, residual

from quark.decide import Target
from quark.features.protection.on_onnx import _extra_bytes
from quark.features.protection.structures import (
    ATTENTION,
    AUDIO,
    CHAINED,
    GATED,
    LONG_ATTENTION,
    NO_KERNEL,
    NORMALIZED,
    POST_PROCESSING,
    ROTARY,
    find_structures,
)
from quark.onnx import get_default_config, quantize
from quark.onnx.load import load
from quark.onnx.macs import layer_macs, tensors_to_size
from quark.plan import Role

RUNTIME, NPU, NPU_TRANSFORMER = Target.ONNX_RUNTIME, Target.NPU_CNN, Target.NPU_TRANSFORMER
WIDTH = 16  # a convolution of 3x3 from 16 to 16 channels has trained weights to speak of
PADS = [1, 1, 1, 1]


class Layers(Net):
    """A net whose layers are large enough to count, and have names."""

    def image(self) -> str:
        return self.input("x", (1, WIDTH, 8, 8))

    def layer(self, x: str, name: str, out: int = WIDTH) -> str:
        return self.conv(x, (WIDTH, out), pads=PADS, name=name)

    def classifier(self, x: str) -> str:
        pooled = self.node("Flatten", self.node("GlobalAveragePool", x, name="pool"), name="flatten")
        return self.node("Gemm", pooled, self.weight(WIDTH, 40), self.weight(40), name="gemm")


def loaded(net: Net, *outputs: str) -> ir.Model:
    return load(net.model(*outputs)).model


def kept(net: Net, *outputs: str, target: Target = RUNTIME) -> dict[str, str]:
    return find_structures(loaded(net, *outputs), target).kept_float


def of_reason(found: dict[str, str], reason: str) -> set[str]:
    return {name for name, each in found.items() if each == reason}


def plain_classifier() -> Layers:
    net = Layers()
    y = net.node("Relu", net.layer(net.image(), "first"), name="relu")
    y = net.node("MaxPool", y, kernel_shape=[2, 2], strides=[2, 2], name="max_pool")
    y = net.node("Relu", net.node("Add", net.layer(y, "second"), y, name="shortcut"), name="relu2")
    net.classifier(y)
    return net


@pytest.mark.parametrize("target", list(Target), ids=lambda each: each.value)
def test_a_plain_classifier_has_nothing_to_protect(target: Target) -> None:
    net = plain_classifier()
    structures = find_structures(loaded(net, "gemm_out"), target)
    assert structures.kept_float == {}
    assert not structures.has_float_products


@pytest.mark.parametrize("model", [conv_bn_relu(), residual()], ids=["conv_bn_relu", "residual"])
@pytest.mark.parametrize("target", [RUNTIME, NPU], ids=lambda each: each.value)
def test_other_plain_networks_have_nothing_to_protect(model, target: Target) -> None:
    assert find_structures(load(model).model, target).kept_float == {}


def detector() -> tuple[Layers, list[str]]:
    """A convolution with SiLU and a detection head of 4 x 16 box bins and 6 classes; its output is `detections`.

    Gives the nodes behind the last layers as well.
    """
    net = Layers()
    y = net.layer(net.image(), "stem")
    y = net.node("Mul", y, net.node("Sigmoid", y, name="gate"), name="silu")
    boxes, scores = net.layer(y, "box_conv", 64), net.layer(y, "score_conv", 6)
    before = len(net.nodes)
    joined = net.node("Concat", boxes, scores, axis=1, name="join")
    flat = net.node("Reshape", joined, net.integers([1, 70, 64]), name="flat")
    bins, logits = net.nodes_of("Split", flat, net.integers([64, 6]), axis=1, name="split", outputs=["bins", "logits"])
    bins = net.node("Reshape", bins, net.integers([1, 4, 16, 64]), name="by_side")
    bins = net.node("Softmax", net.node("Transpose", bins, perm=[0, 2, 1, 3], name="turn"), axis=1, name="softmax")
    numbers = net.constant(np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1))
    distances = net.node("Conv", bins, numbers, name="expected_bin")
    distances = net.node("Reshape", distances, net.integers([1, 4, 64]), name="sides")
    boxes = net.node("Sub", net.weight(1, 4, 64), distances, name="from_anchors")
    boxes = net.node("Mul", boxes, net.constant(8.0), name="strides")
    net.node("Concat", boxes, net.node("Sigmoid", logits, name="scores"), axis=1, name="result", output="detections")
    return net, [node.name for node in net.nodes[before:]]


def test_a_detection_head_is_protected_and_its_layers_are_not() -> None:
    net, head = detector()
    found = kept(net, "detections")
    assert of_reason(found, POST_PROCESSING) == set(head)
    assert "expected_bin" in head  # a convolution of 16 numbers that nothing trained
    assert not {"stem", "box_conv", "score_conv"} & set(found)
    assert of_reason(found, GATED) == {"gate", "silu"}


def test_an_npu_only_leaves_post_processing_to_the_processor() -> None:
    net, head = detector()
    assert kept(net, "detections", target=NPU) == dict.fromkeys(head, POST_PROCESSING)


def test_the_activation_of_a_last_layer_stays_with_it() -> None:
    net = Layers()
    y = net.node("Relu", net.layer(net.image(), "conv"), name="relu")
    net.node("Softmax", net.node("Reshape", y, net.integers([1, -1]), name="rows"), axis=1, name="softmax")
    assert set(kept(net, "softmax_out", target=NPU)) == {"rows", "softmax"}


def test_a_tail_that_only_moves_and_pools_is_no_post_processing() -> None:
    net = Layers()
    y = net.node("Relu", net.layer(net.image(), "conv"), name="relu")
    y = net.node("AveragePool", y, kernel_shape=[2, 2], name="pool")
    assert kept(net, net.node("Transpose", y, perm=[0, 2, 3, 1], name="turn")) == {}


def test_a_recurrent_network_ends_where_its_last_recurrence_does() -> None:
    net = Layers()
    x = net.input("x", (5, 1, WIDTH))
    shapes = ((1, 4 * 8, WIDTH), (1, 4 * 8, 8))
    y = net.node("LSTM", x, *(net.weight(*shape) for shape in shapes), hidden_size=8, name="lstm")
    net.node("Sigmoid", net.node("Squeeze", y, net.integers([1]), name="squeeze"), name="score")
    assert set(kept(net, "score_out", target=NPU)) == {"squeeze", "score"}


def test_no_layers_no_post_processing() -> None:
    net = Net()
    assert kept(net, net.node("Sigmoid", net.input("x", (1, 4)))) == {}


def between_layers(make) -> tuple[Layers, set[str]]:
    """`make` between two convolutions, and the names of the nodes that it makes; the output is `last_out`."""
    net = Layers()
    y = net.layer(net.image(), "first")
    before = len(net.nodes)
    made = make(net, y)
    names = {node.name for node in net.nodes[before:]}
    net.layer(made, "last")
    return net, names


def silu(net: Net, x: str) -> str:
    return net.node("Mul", x, net.node("Sigmoid", x))


def hard_swish(net: Net, x: str) -> str:
    return net.node("Mul", net.node("HardSigmoid", x, alpha=1 / 6), x)


def clipped_hard_swish(net: Net, x: str) -> str:
    gate = net.node("Clip", net.node("Add", x, net.constant(3.0)), net.constant(0.0), net.constant(6.0))
    return net.node("Div", net.node("Mul", x, gate), net.constant(6.0))


def gelu_tanh(net: Net, x: str) -> str:
    cube = net.node("Mul", net.node("Pow", x, net.constant(3.0)), net.constant(0.044715))
    gate = net.node("Tanh", net.node("Mul", net.node("Add", x, cube), net.constant((2 / np.pi) ** 0.5)))
    return net.node("Mul", net.node("Mul", x, net.constant(0.5)), net.node("Add", gate, net.constant(1.0)))


def mish(net: Net, x: str) -> str:
    return net.node("Mul", x, net.node("Tanh", net.node("Softplus", x)))


@pytest.mark.parametrize(
    "make", [silu, hard_swish, clipped_hard_swish, gelu_erf, gelu_tanh, mish], ids=lambda each: each.__name__
)
def test_nothing_is_quantized_inside_a_gated_activation(make) -> None:
    net, names = between_layers(make)
    for target in (RUNTIME, NPU_TRANSFORMER):
        assert kept(net, "last_out", target=target) == dict.fromkeys(names, GATED)
    assert kept(net, "last_out", target=NPU) == {}


def test_a_gate_of_something_else_is_no_gated_activation() -> None:
    """Squeeze and excitation multiplies a tensor by the Sigmoid of another."""
    net = Layers()
    y = net.node("Relu", net.layer(net.image(), "first"), name="relu")
    gate = net.node("Sigmoid", net.layer(net.node("GlobalAveragePool", y, name="pool"), "gate_conv"), name="gate")
    net.layer(net.node("Mul", y, gate, name="scaled"), "last")
    assert kept(net, "last_out") == {}


def attention(net: Layers, mask: str | None, positions: int = 8) -> None:
    """One head; the output is `project_out`."""
    x = net.input("x", (1, positions, 32))
    q, k, v = (net.node("MatMul", x, net.weight(32, 32), name=name) for name in "qkv")
    scores = net.node("MatMul", q, net.node("Transpose", k, perm=[0, 2, 1], name="turn"), name="scores")
    if mask == "added":
        hidden = net.node("Sub", net.constant(1.0), net.input("mask", (1, 1, positions)), name="hidden")
        scores = net.node("Add", scores, net.node("Mul", hidden, net.constant(-1e4), name="large"), name="masked")
    elif mask == "chosen":
        is_seen = net.input("mask", (1, 1, positions), np.bool_)
        scores = net.node("Where", is_seen, scores, net.constant(np.float32(-3.4e38)), name="masked")
    weights = net.node("Softmax", scores, axis=-1, name="softmax")
    y = net.node("MatMul", weights, v, name="mixed")
    net.node("MatMul", y, net.weight(32, 32), name="project")


@pytest.mark.parametrize(
    ("mask", "expected"),
    [(None, {"softmax"}), ("added", {"softmax", "masked", "large"}), ("chosen", {"softmax", "masked"})],
    ids=["no_mask", "added", "chosen"],
)
def test_softmax_and_its_mask_stay_in_float(mask: str | None, expected: set[str]) -> None:
    net = Layers()
    attention(net, mask)
    found = kept(net, "project_out", target=NPU_TRANSFORMER)
    assert found == dict.fromkeys(expected, ATTENTION)
    assert kept(net, "project_out", target=NPU) == {}


def test_a_small_constant_is_no_mask() -> None:
    net = Layers()
    y = net.layer(net.image(), "first")
    y = net.node("Softmax", net.node("Add", y, net.constant(-30.0), name="offset"), axis=1, name="softmax")
    net.layer(y, "last")
    assert of_reason(kept(net, "last_out"), ATTENTION) == {"softmax"}


@pytest.mark.parametrize(("positions", "is_long"), [(256, False), (257, True)])
def test_products_with_a_softmax_over_many_positions_stay_in_float(positions: int, is_long: bool) -> None:
    net = Layers()
    attention(net, None, positions)
    found = kept(net, "project_out")
    assert of_reason(found, LONG_ATTENTION) == ({"mixed"} if is_long else set())
    assert "scores" not in found


def test_a_softmax_over_an_unknown_number_of_positions_is_not_called_long() -> None:
    net = Layers()
    x = net.input("x", (1, "positions", 32))
    weights = net.node("Softmax", net.node("MatMul", x, net.weight(32, 32), name="first"), axis=1, name="softmax")
    net.node("MatMul", weights, net.weight(32, 32), name="last")
    assert of_reason(kept(net, "last_out"), LONG_ATTENTION) == set()


def normalized_network(is_decomposed: bool, count: int = 2) -> Layers:
    """Feed-forward layers with residual Adds and normalizations; the output is `head_out`."""
    net = Layers()
    words = net.input("words", (1, 6), np.int64)
    x = net.node("Gather", net.weight(50, 32), words, name="table")
    for i in range(count):
        if is_decomposed:
            y = net.normalized(x, [-1])
        else:
            y = net.node("LayerNormalization", x, net.weight(32), net.weight(32), name=f"norm{i}")
        y = net.node("Relu", net.node("MatMul", y, net.weight(32, 32), name=f"up{i}"), name=f"relu{i}")
        y = net.node("MatMul", y, net.weight(32, 32), name=f"down{i}")
        x = net.node("Add", x, y, name=f"residual{i}")
    net.node("MatMul", x, net.weight(32, 32), name="head")
    return net


@pytest.mark.parametrize("is_decomposed", [False, True], ids=["one_node", "decomposed"])
@pytest.mark.parametrize("target", [RUNTIME, NPU_TRANSFORMER], ids=lambda each: each.value)
def test_between_the_products_of_a_normalized_network_all_is_float(is_decomposed: bool, target: Target) -> None:
    net = normalized_network(is_decomposed)
    structures = find_structures(loaded(net, "head_out"), target)
    products = {"table", "head", "up0", "down0", "up1", "down1"}
    assert structures.kept_float == dict.fromkeys({node.name for node in net.nodes} - products, NORMALIZED)
    assert structures.has_float_products


def mean_square(net: Net, x: str) -> str:
    return net.node("Add", net.reduce("ReduceMean", net.node("Mul", x, x), [-1]), net.constant(1e-6))


def by_reciprocal(net: Net, x: str) -> str:
    return net.node("Mul", x, net.node("Reciprocal", net.node("Sqrt", mean_square(net, x))))


def by_quotient(net: Net, x: str) -> str:
    return net.node("Mul", net.node("Div", net.constant(1.0), net.node("Sqrt", mean_square(net, x))), x)


def by_power(net: Net, x: str) -> str:
    return net.node("Mul", x, net.node("Pow", mean_square(net, x), net.constant(-0.5)))


def by_cast(net: Net, x: str) -> str:
    """As half-precision networks have it: the root is computed in float32."""
    root = net.node("Cast", net.node("Sqrt", mean_square(net, x)), to=onnx.TensorProto.FLOAT)
    return net.node("Div", x, root)


def by_rows(net: Net, x: str) -> str:
    """What a rewrite makes of a layer normalization where the opset has no LayerNormalization."""
    y = net.node(
        "InstanceNormalization", x, net.constant(np.ones(6, np.float32)), net.constant(np.zeros(6, np.float32))
    )
    return net.node("Add", net.node("Mul", y, net.weight(32)), net.weight(32))


def by_sums(net: Net, x: str) -> str:
    """As JAX writes it: sums times 1/n, the variance as a difference that is kept positive, the gain first."""
    share = net.constant(1 / 32)
    mean = net.node("Mul", net.reduce("ReduceSum", x, [-1], keepdims=0), share)
    square = net.node("Mul", net.reduce("ReduceSum", net.node("Mul", x, x), [-1], keepdims=0), share)
    variance = net.node("Relu", net.node("Sub", square, net.node("Mul", mean, mean)))
    shape = net.constant(np.array([1, 6, 1]))
    mean, variance = (net.node("Expand", net.node("Reshape", value, shape), shape) for value in (mean, variance))
    root = net.node("Sqrt", net.node("Add", variance, net.constant(1e-6)))
    gain = net.node("Mul", net.node("Reciprocal", root), net.weight(32))
    return net.node("Add", net.node("Mul", net.node("Sub", x, mean), gain), net.weight(32))


def by_pooling(net: Net, x: str) -> str:
    """A rewrite turns means over the last axis into GlobalAveragePool."""
    centred = net.node("Sub", x, net.node("GlobalAveragePool", x))
    variance = net.node("GlobalAveragePool", net.node("Pow", centred, net.constant(2.0)))
    return net.node("Div", centred, net.node("Sqrt", net.node("Add", variance, net.constant(1e-6))))


@pytest.mark.parametrize(
    "norm",
    [by_reciprocal, by_quotient, by_power, by_cast, by_rows, by_sums, by_pooling],
    ids=lambda each: each.__name__,
)
def test_normalizations_are_recognised_in_all_their_forms(norm) -> None:
    net = Layers()
    x = net.input("x", (1, 6, 32))
    for i in range(2):
        x = net.node("Add", x, net.node("MatMul", norm(net, x), net.weight(32, 32), name=f"down{i}"))
    net.node("MatMul", x, net.weight(32, 32), name="head")
    structures = find_structures(loaded(net, "head_out"), RUNTIME)
    assert structures.has_float_products
    assert set(structures.kept_float) == {node.name for node in net.nodes} - {"down0", "down1", "head"}


def test_a_recurrent_layer_of_a_normalized_network_has_integer_weights() -> None:
    net = Layers()
    x = net.input("x", (1, 6, 32))
    for i in range(2):
        x = net.node("MatMul", by_power(net, x), net.weight(32, 32), name=f"up{i}")
    x = net.node("GRU", x, net.weight(1, 48, 32), net.weight(1, 48, 16), hidden_size=16, name="gru")
    net.node("MatMul", x, net.weight(16, 32), name="head")
    structures = find_structures(loaded(net, "head_out"), RUNTIME)
    assert structures.has_float_products
    assert "gru" not in structures.kept_float


def test_a_mean_without_a_root_is_no_normalization() -> None:
    net = Layers()
    x = net.input("x", (1, 6, 32))
    for i in range(2):
        y = net.node("Mul", x, net.node("Pow", mean_square(net, x), net.constant(-2.0)))
        x = net.node("MatMul", y, net.weight(32, 32), name=f"down{i}")
    net.node("MatMul", x, net.weight(32, 32), name="head")
    assert not find_structures(loaded(net, "head_out"), RUNTIME).has_float_products


def test_nothing_is_quantized_inside_a_rotary_embedding() -> None:
    net = Layers()
    x = net.node("MatMul", net.input("x", (1, 6, 32)), net.weight(32, 32), name="first")
    before = len(net.nodes)
    halves = [net.node("Slice", x, *map(net.integers, ([i], [i + 16], [2])), name=f"half{i}") for i in (0, 16)]
    turned = net.node("Concat", net.node("Neg", halves[1]), halves[0], axis=-1)
    y = net.node(
        "Add", net.node("Mul", x, net.input("cos", (6, 32))), net.node("Mul", turned, net.input("sin", (6, 32)))
    )
    rotary = {node.name for node in net.nodes[before:]}
    net.node("MatMul", y, net.weight(32, 32), name="last")
    assert kept(net, "last_out") == dict.fromkeys(rotary, ROTARY)


@pytest.mark.parametrize("is_decomposed", [False, True], ids=["one_node", "decomposed"])
def test_one_normalization_makes_no_normalized_network(is_decomposed: bool) -> None:
    net = normalized_network(is_decomposed, count=1)
    structures = find_structures(loaded(net, "head_out"), RUNTIME)
    assert of_reason(structures.kept_float, NORMALIZED) == set()
    assert not structures.has_float_products


def test_an_npu_for_convolutional_networks_keeps_its_residual_stream() -> None:
    assert find_structures(loaded(normalized_network(False), "head_out"), NPU).kept_float == {}


def test_everything_before_a_logarithm_is_an_audio_front_end() -> None:
    net = Layers()
    spectrum = net.layer(net.image(), "spectrum")
    power = net.node("Mul", spectrum, spectrum, name="power")
    y = net.node("Log", net.node("Add", power, net.constant(1e-6), name="floor"), name="log")
    y = net.node("Relu", net.layer(y, "first"), name="relu")
    net.layer(y, "last")
    expected = dict.fromkeys(("spectrum", "power", "floor", "log"), AUDIO)
    assert kept(net, "last_out") == expected
    assert kept(net, "last_out", target=NPU) == {}


@pytest.mark.parametrize("has_activation", [False, True])
def test_a_spectrum_is_a_front_end_however_many_layers_it_has(has_activation: bool) -> None:
    """The constant-Q transform of basic-pitch has 26 convolutions, and the network behind it 6."""
    net = Layers()
    y = net.layer(net.layer(net.image(), "octave_1"), "octave_2")
    if has_activation:
        y = net.node("Relu", y, name="relu")
    y = net.node("Log", net.node("Mul", y, y, name="power"), name="log")
    net.layer(y, "last")
    front_end = () if has_activation else ("octave_1", "octave_2", "power", "log")
    assert of_reason(kept(net, "last_out"), AUDIO) == set(front_end)


@pytest.mark.parametrize("has_squares", [False, True])
def test_a_network_that_is_nothing_but_a_front_end_stays_in_float(has_squares: bool) -> None:
    """Mel features: a spectrum, its power, a product over frequencies, and the logarithm, which is the result."""
    net = Layers()
    y = net.layer(net.image(), "fourier")
    if has_squares:
        y = net.node("ReduceSumSquare", y, axes=[1], name="power")
        y = net.node("Concat", *[y] * WIDTH, axis=1, name="copies")
    y = net.layer(y, "mel")
    net.node("Log", net.node("Add", y, net.constant(1e-6), name="floor"), name="log")
    found = kept(net, "log_out")
    assert of_reason(found, AUDIO) == ({"fourier", "power", "copies", "mel"} if has_squares else set())
    assert of_reason(found, POST_PROCESSING) == {"floor", "log"}


@pytest.mark.parametrize("has_activation", [False, True])
@pytest.mark.parametrize("has_floor", [False, True])
def test_a_spectrum_before_its_magnitudes_is_a_front_end(has_activation: bool, has_floor: bool) -> None:
    """The Fourier transform of silero-vad, whose magnitudes go into the first layer without a logarithm."""
    net = Layers()
    y = net.layer(net.image(), "fourier")
    if has_activation:
        y = net.node("Relu", y, name="relu")
    real, imaginary = (net.node("Slice", y, *map(net.integers, ([i], [i + 8], [1])), name=f"part{i}") for i in (0, 8))
    squares = net.node("Pow", real, net.constant(2.0), name="real"), net.node("Mul", imaginary, imaginary, name="im")
    y = net.node("Add", *squares, name="power")
    if has_floor:
        y = net.node("Add", y, net.constant(1e-9), name="floor")
    net.conv(net.node("Sqrt", y, name="root"), (8, WIDTH), pads=PADS, name="last")
    front_end = {"fourier", "part0", "part8", "real", "im", "power", "root", *(["floor"] if has_floor else [])}
    assert of_reason(kept(net, "last_out"), AUDIO) == (set() if has_activation else front_end)


def test_a_logarithm_at_the_end_protects_no_layer() -> None:
    """LogSoftmax, written out."""
    net = plain_classifier()
    net.node("Log", net.node("Softmax", "gemm_out", axis=1, name="softmax"), name="log")
    for target in (RUNTIME, NPU):
        assert kept(net, "log_out", target=target) == dict.fromkeys(("softmax", "log"), POST_PROCESSING)


def prelu(net: Net, x: str) -> str:
    return net.node("PRelu", x, net.weight(WIDTH, 1, 1))


def upsampled(net: Net, x: str) -> str:
    return net.conv(x, (WIDTH, WIDTH), op_type="ConvTranspose")


def resize(mode: str):
    def made(net: Net, x: str) -> str:
        return net.node("Resize", x, "", net.constant(np.array([1, 1, 2, 2], np.float32)), mode=mode)

    return made


@pytest.mark.parametrize("make", [prelu, upsampled, resize("linear")], ids=["prelu", "conv_transpose", "linear"])
def test_what_onnx_runtime_computes_in_float_stays_in_float(make) -> None:
    net, names = between_layers(make)
    assert kept(net, "last_out") == dict.fromkeys(names, NO_KERNEL)
    assert kept(net, "last_out", target=NPU) == {}


def test_resize_by_repeating_is_quantized() -> None:
    net, _ = between_layers(resize("nearest"))
    assert kept(net, "last_out") == {}


def test_constant_factors_and_offsets_between_layers_stay_in_float() -> None:
    def chain(net: Net, x: str) -> str:
        y = net.node("Relu", x, name="relu")
        for name, number in (("Mul", 0.5), ("Add", 3.0), ("Sub", 1.0), ("Div", 4.0)):
            y = net.node(name, y, net.constant(number), name=name.lower())
        return net.node("Add", y, y, name="sum")

    net, _ = between_layers(chain)
    assert kept(net, "last_out") == dict.fromkeys(("mul", "add", "sub", "div"), CHAINED)
    assert kept(net, "last_out", target=NPU) == {}


def test_the_bias_of_a_product_belongs_to_the_product() -> None:
    net = Layers()
    y = net.node("MatMul", net.input("x", (1, 6, 32)), net.weight(32, 32), name="first")
    net.node("MatMul", net.node("Add", y, net.weight(32), name="bias"), net.weight(32, 32), name="last")
    assert kept(net, "last_out") == {}


def test_inputs_of_a_concatenation_keep_scales_of_their_own_for_onnx_runtime_only() -> None:
    model = loaded(plain_classifier(), "gemm_out")
    assert [find_structures(model, target).has_own_concat_scales for target in (RUNTIME, NPU)] == [True, False]


def test_multiply_accumulates_of_every_kind_of_layer() -> None:
    net = Layers()
    y = net.conv(net.image(), (WIDTH, WIDTH), pads=PADS, group=4, name="conv")
    y = net.conv(y, (WIDTH, WIDTH), 2, op_type="ConvTranspose", strides=[2, 2], name="up")
    rows = net.node("Reshape", y, net.integers([1, WIDTH, 256]), name="rows")
    y = net.node("MatMul", rows, net.weight(256, 10), name="matmul")
    y = net.node("MatMul", y, net.node("Transpose", y, perm=[0, 2, 1], name="turn"), name="gram")
    flat = net.node("Flatten", y, name="flat")
    net.node("Gemm", flat, net.weight(256, 7), name="gemm")
    model = loaded(net, "gemm_out")
    shapes = {"x": (1, 16, 8, 8), "conv_out": (1, 16, 8, 8), "up_out": (1, 16, 16, 16), "rows_out": (1, 16, 256)}
    shapes |= {"matmul_out": (1, 16, 10), "gram_out": (1, 16, 16), "flat_out": (1, 256), "gemm_out": (1, 7)}
    assert set(tensors_to_size(model)) <= set(shapes)
    assert layer_macs(model, shapes) == {
        "conv": 16 * 4 * 9 * 64,
        "up": 16 * 16 * 4 * 64,
        "matmul": 16 * 256 * 10,
        "gram": 16 * 10 * 16,
        "gemm": 256 * 7,
    }
    assert layer_macs(model, {})["conv"] == 0


def test_a_recurrent_layer_has_weights_and_multiplies_at_every_step() -> None:
    """A budget that counts neither would leave the heaviest layer of a text reader in float, as if that were free."""
    net = Layers()
    x = net.node("Transpose", net.input("x", (2, 20, 32)), perm=[1, 0, 2], name="turn")
    net.node("LSTM", x, net.weight(1, 64, 32), net.weight(1, 64, 16), hidden_size=16, name="lstm")
    model = loaded(net, "lstm_out")
    assert tensors_to_size(model) == ["turn_out"]
    assert layer_macs(model, {"turn_out": (20, 2, 32)}) == {"lstm": (64 * 32 + 64 * 16) * 20 * 2}
    assert _extra_bytes(model.graph) == 3 * (64 * 32 + 64 * 16)


@pytest.mark.parametrize(("words", "target"), [(8192, NPU_TRANSFORMER), (8191, NPU_TRANSFORMER), (8192, RUNTIME)])
def test_the_input_of_the_last_product_over_a_vocabulary_stays_in_float(words: int, target: Target) -> None:
    net = normalized_network(is_decomposed=False)
    net.node("MatMul", "residual1_out", net.constant(np.zeros((32, words), np.float32)), name="words")
    structures = find_structures(loaded(net, "words_out"), target)
    is_expected = words == 8192 and target is NPU_TRANSFORMER
    assert structures.weights_only == (("words",) if is_expected else ())
    assert "words" not in structures.kept_float


def test_a_product_over_a_vocabulary_has_a_quantized_weight_and_a_float_input() -> None:
    net = normalized_network(is_decomposed=False)
    net.node("MatMul", "residual1_out", net.constant(np.full((32, 8192), 0.1, np.float32)), name="words")
    samples = [{"words": np.arange(6).reshape(1, 6) + i} for i in range(8)]
    config = get_default_config("INT8_TRANSFORMER_DEFAULT")
    config.include_sq, config.extra_options["Protect"] = False, "structures"
    plan = quantize(net.model("words_out"), samples, config).report.plan
    roles = [tensor.role for tensor in plan for reader in tensor.readers if reader.node == "words"]
    assert roles == [Role.WEIGHT]
