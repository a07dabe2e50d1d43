"""Where samples decide nothing, the verdict runs on few of them if the network is expensive; the file is the same."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

import quark.onnx.quantization.pipeline as pipeline
from quark.demo import network_path
from quark.onnx import quantize
from quark.onnx.load import load
from quark.onnx.macs import estimated_macs, multiplications
from quark.onnx.quantization.config.options import settings_of

SAMPLES = np.random.default_rng(0).random((24, 1, 8, 8), dtype=np.float32)


@pytest.mark.parametrize("preset", ["UINT8_DYNAMIC_QUANT", "INT4_WEIGHT_ONLY", "MATMUL_NBITS"])
def test_few_samples_are_compared_where_nothing_else_needs_them(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = quantize(network_path(), SAMPLES, preset)
    monkeypatch.setattr(pipeline, "VERDICT_MACS", 1)
    bounded = quantize(network_path(), SAMPLES, preset)
    assert usual.report.calibration.held_out > 1
    assert bounded.report.calibration.held_out == 1
    assert bounded.report.outputs
    assert bounded.model.SerializeToString() == usual.model.SerializeToString()


def test_one_sample_of_random_numbers_is_compared() -> None:
    report = quantize(network_path(), config="UINT8_DYNAMIC_QUANT").report
    assert report.calibration.is_random
    assert report.calibration.held_out == 1
    assert report.outputs


@pytest.mark.parametrize("preset", ["XINT8", "MXINT8"])
def test_all_are_compared_where_the_verdict_decides(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "VERDICT_MACS", 1)
    assert quantize(network_path(), SAMPLES, preset).report.calibration.held_out > 1


def test_macs_follow_the_shape_of_a_sample() -> None:
    model = load(network_path(), settings_of("XINT8").load).model
    wanted = estimated_macs(model, {str(model.graph.inputs[0].name): (1, 1, 8, 8)})
    assert wanted > 0
    for value in (*model.graph.inputs, *(output for node in model.graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([None] * len(value.shape))
    assert any(multiplications(node) is None for node in model.graph)
    assert estimated_macs(model, {str(model.graph.inputs[0].name): (1, 1, 8, 8)}) == wanted
    assert estimated_macs(model, {}) < wanted
    assert any(multiplications(node) is None for node in model.graph)  # the model itself was not changed
