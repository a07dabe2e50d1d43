"""The configuration that a target chooses, and what `quantize` does without a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import quark.demo
import quark.onnx
from quark.errors import InvalidValueError, QuarkError
from quark.onnx.quantization.targets import Target, usual_config

IMAGES = np.random.default_rng(0).random((32, 1, 8, 8), dtype=np.float32)


def encoder() -> onnx.ModelProto:
    """A layer normalization, attention without heads, and a product."""
    generator = np.random.default_rng(0)

    def constant(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((generator.standard_normal(shape) / 4).astype(np.float32), name)

    nodes = [
        helper.make_node("LayerNormalization", ["x", "gain", "shift"], ["n"], name="norm"),
        *(helper.make_node("MatMul", ["n", f"w{i}"], [f"p{i}"], name=f"product{i}") for i in range(3)),
        helper.make_node("Transpose", ["p1"], ["t"], perm=[0, 2, 1], name="transpose"),
        helper.make_node("MatMul", ["p0", "t"], ["s"], name="scores"),
        helper.make_node("Softmax", ["s"], ["a"], axis=-1, name="softmax"),
        helper.make_node("MatMul", ["a", "p2"], ["y"], name="mix"),
    ]
    constants = [constant("gain", 32), constant("shift", 32), *(constant(f"w{i}", 32, 32) for i in range(3))]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", "L", 32]) for name in "xy"]
    graph = helper.make_graph(nodes, "encoder", ports[:1], ports[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def written_out_norm() -> onnx.ModelProto:
    """Products between which a normalization is written as a mean, a square and a root."""
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    norm (float[N,32] x, float[32,32] w, float e) => (float[N,32] y) {
        a = MatMul (x, w)
        mean = ReduceMean <axes = [-1]> (a)
        centred = Sub (a, mean)
        square = Mul (centred, centred)
        variance = ReduceMean <axes = [-1]> (square)
        positive = Add (variance, e)
        root = Sqrt (positive)
        normal = Div (centred, root)
        y = MatMul (normal, w)
    }
    """
    return onnx.parser.parse_model(text)


def classifier_of_a_spectrum() -> onnx.ModelProto:
    """A spectrum by products and roots, a convolution, a mean, and a Softmax at the end: no transformer."""
    text = """
    <ir_version: 8, opset_import: ["": 17]>
    spectrum (float[1,64,32] x, float[32,16] c, float[32,16] s, float[16,16] mel, float[4,1,3,3] w) => (float[1,4] y) {
        real = MatMul (x, c)
        imaginary = MatMul (x, s)
        real2 = Mul (real, real)
        imaginary2 = Mul (imaginary, imaginary)
        power = Add (real2, imaginary2)
        magnitude = Sqrt (power)
        bands = MatMul (magnitude, mel)
        axes = Constant <value_ints = [1]> ()
        image = Unsqueeze (bands, axes)
        features = Conv (image, w)
        mean = ReduceMean <axes = [2, 3], keepdims = 0> (features)
        y = Softmax (mean)
    }
    """
    return onnx.parser.parse_model(text)


def test_a_transformer_is_known_by_how_its_nodes_are_joined() -> None:
    assert usual_config("cpu", written_out_norm()).name == "INT8_TRANSFORMER_DEFAULT"
    assert usual_config("cpu", classifier_of_a_spectrum()).name == "INT8_CNN_DEFAULT"
    attention = encoder()
    del attention.graph.node[0]
    attention.graph.input[0].name = "n"
    assert usual_config("cpu", attention).name == "INT8_TRANSFORMER_DEFAULT"


@pytest.mark.parametrize(
    ("target", "of_convolutions", "of_transformer"),
    [
        ("cpu", "INT8_CNN_DEFAULT", "INT8_TRANSFORMER_DEFAULT"),
        ("onnxruntime", "INT8_CNN_DEFAULT", "INT8_TRANSFORMER_DEFAULT"),
        ("npu", "XINT8", "BF16 BF16QDQToCast=true"),
        ("gpu", "FP16 WeightsOnly=true", "FP16 WeightsOnly=true"),
        ("size", "MXFP6E2M3 WeightsOnly=true", "INT4_WEIGHT_ONLY"),
    ],
)
def test_a_target_chooses_by_the_operators(target: str, of_convolutions: str, of_transformer: str) -> None:
    assert usual_config(target, quark.demo.network_path()).name == of_convolutions
    assert usual_config(target, encoder()).name == of_transformer
    assert usual_config(target, encoder().SerializeToString()).name == of_transformer


def test_without_a_config_the_target_is_the_cpu_and_the_summary_says_why() -> None:
    result = quark.onnx.quantize(quark.demo.network_path(), IMAGES)
    assert result.report.config_name == "INT8_CNN_DEFAULT"
    assert "INT8_CNN_DEFAULT, the default for cpu" in " ".join(result.summary().split())
    named = quark.onnx.quantize(quark.demo.network_path(), IMAGES, "INT8_CNN_DEFAULT")
    assert named.model.graph == result.model.graph
    assert named.report.chosen_by == ""


def test_the_size_target_packs_and_needs_no_data(tmp_path: Path) -> None:
    result = quark.onnx.quantize(quark.demo.network_path(), target="size")
    packed, plain = result.save(tmp_path / "packed.onnx"), result.save(tmp_path / "plain.onnx", pack=False)
    assert packed.stat().st_size < plain.stat().st_size
    assert result.save(tmp_path / "again.onnx", pack=True).read_bytes() == packed.read_bytes()


@pytest.mark.parametrize("target", [target.value for target in Target])
def test_every_target_makes_a_file_and_says_why(target: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "images.npz", input=IMAGES)
    result = quark.onnx.quantize(quark.demo.network_path(), tmp_path / "images.npz", target=target)
    result.save(tmp_path / "q.onnx")
    assert result.report.chosen_by.startswith(f"the default for {target}")
    assert result.report.plan.tensors


def test_a_target_and_a_config_contradict_each_other() -> None:
    with pytest.raises(InvalidValueError, match="give one of them"):
        quark.onnx.quantize(quark.demo.network_path(), IMAGES, "XINT8", target="cpu")
    with pytest.raises(QuarkError, match="no target 'gpus'. Did you mean gpu"):
        quark.onnx.quantize(quark.demo.network_path(), IMAGES, target="gpus")


def test_transform_makes_samples_of_what_a_loader_yields() -> None:
    loader: list[Any] = [{"pixels": image[None], "label": 3} for image in IMAGES]
    result = quark.onnx.quantize(quark.demo.network_path(), loader, "XINT8", transform=lambda each: each["pixels"])
    plain = quark.onnx.quantize(quark.demo.network_path(), [image[None] for image in IMAGES], "XINT8")
    assert result.plan == plain.plan
    with pytest.raises(InvalidValueError, match="transform with data of type ndarray"):
        quark.onnx.quantize(quark.demo.network_path(), IMAGES, "XINT8", transform=lambda each: each)


def test_samples_are_counted_one_by_one_also_in_batches() -> None:
    result = quark.onnx.quantize(quark.demo.network_path(), np.split(IMAGES, 4), "XINT8")
    facts = result.report.calibration
    assert (facts.samples, facts.batches, facts.held_out) == (24, 3, 8)
    assert "24 samples in 3 runs" in result.summary()


def test_a_result_shows_its_summary_in_a_shell_and_in_a_notebook() -> None:
    result = quark.onnx.quantize(quark.demo.network_path(), IMAGES, "XINT8")
    assert repr(result) == result.summary().rstrip("\n")
    assert repr(result).startswith("OK: ")
    assert result._repr_html_().startswith("<pre>OK: ")


def test_public_names_are_listed() -> None:
    assert {"quantize", "auto_quantize", "get_default_config", "ModelQuantizer"} <= set(dir(quark.onnx))
    assert not {"import_module", "TYPE_CHECKING", "require_onnxruntime"} & set(dir(quark.onnx))


def float16_model() -> onnx.ModelProto:
    """A float16 network with a Concat, which has an integer kernel with float32 scales only."""
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float16), "w")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="conv"),
        helper.make_node("MaxPool", ["a"], ["b"], name="pool", kernel_shape=[1, 1]),
        helper.make_node("Concat", ["a", "b"], ["c"], name="concat", axis=1),
        helper.make_node("GlobalAveragePool", ["c"], ["y"], name="mean"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["N", 3, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["N", 8, 1, 1])
    graph = helper.make_graph(nodes, "half", [x], [y], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)


def test_a_float16_model_computes_in_float32_for_integer_presets_and_says_so() -> None:
    samples = np.random.default_rng(0).random((8, 3, 8, 8)).astype(np.float16)
    result = quark.onnx.quantize(float16_model(), samples, "INT8_CNN_DEFAULT")
    assert result.report.verdict.value == "ok"
    assert [port.type.tensor_type.elem_type for port in result.model.graph.input] == [TensorProto.FLOAT16]
    assert "float16 converted to float32" in result.summary()
    assert "QuantizeFP16=true" in result.summary()
    kept = quark.onnx.quantize(float16_model(), samples, "MXINT8")
    assert not any("float16" in remark for remark in kept.report.remarks)
