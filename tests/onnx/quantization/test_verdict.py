"""The verdict where the float network has nothing to compare with."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from onnx_models import Net

from quark.compare import Verdict
from quark.inspect.diagnose import diagnose
from quark.onnx import quantize

X = np.random.default_rng(0).standard_normal((6, 1, 4)).astype(np.float32)


def overflowing(has_second_output: bool) -> onnx.ModelProto:
    """A product of more than float32 holds; beside it, where wanted, what was multiplied."""
    net = Net()
    product = net.node("MatMul", net.input("x", (1, 4)), net.weight(4, 4))
    large = net.node("Add", net.node("Abs", product), net.constant(np.array(1e3, np.float32)))
    y = net.node("Mul", large, net.constant(np.array(1e38, np.float32)))
    return net.model(y, *[product] * has_second_output)


@pytest.mark.parametrize("has_second_output", [False, True])
def test_an_output_without_numbers_is_not_called_exact(has_second_output: bool) -> None:
    report = quantize(overflowing(has_second_output), X, "MXINT8").report
    assert report.verdict is (Verdict.OK if has_second_output else Verdict.UNCHECKED)
    assert len(report.outputs) == has_second_output
    assert sum("NaN or Inf for every sample" in remark for remark in report.remarks) == 1


def test_outputs_have_parts_and_integers_are_compared_too() -> None:
    net = Net()
    logits = net.node("MatMul", net.input("x", (1, 4)), net.weight(4, 10))
    model = net.model(logits, net.node("ArgMax", logits, axis=1, keepdims=0))
    model.graph.output[1].type.tensor_type.elem_type = onnx.TensorProto.INT64
    report = quantize(model, X, "MXINT8").report
    assert [output.kind for output in report.outputs] == ["classes", "ids"]
    assert all(output.distance >= 0 for output in report.outputs)
    kinds = [part["kind"] for output in json.loads(report.to_json())["outputs"] for part in output["parts"]]
    assert kinds == ["classes", "ids"]


def test_a_report_on_the_file_says_so_too() -> None:
    model = overflowing(has_second_output=False)
    diagnosis = diagnose(model, quantize(model, X, "MXINT8").model, X)
    assert diagnosis.verdict is Verdict.UNCHECKED
    assert any("NaN or Inf for every sample" in remark for remark in diagnosis.remarks)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_a_network_that_draws_random_numbers_is_not_called_broken(scale: float) -> None:
    """Speech synthesis and samplers add noise: two runs of the float network differ as much as they want."""
    net = Net()
    x = net.input("x", (1, 4))
    noise = net.node("Mul", net.node("RandomNormalLike", x, name="draw"), net.input("scale", ()))
    model = net.model(net.node("MatMul", net.node("Add", x, noise), net.weight(4, 4)))
    samples = [{"x": row, "scale": np.float32(scale)} for row in X]
    report = quantize(model, samples, "INT8_CNN_DEFAULT").report
    assert report.verdict is (Verdict.UNCHECKED if scale else Verdict.OK)
    assert report.calibration.is_network_random == bool(scale)
    assert any("RandomNormalLike 'draw'" in each for each in report.remarks) == bool(scale)
    assert report.protection is None or not report.protection.tried
