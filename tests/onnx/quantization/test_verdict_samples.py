"""Few held-out samples do not hide what the network does with the samples that it was calibrated on."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_models import Net

import quark.onnx.quantization.pipeline as pipeline
from quark.compare import Verdict
from quark.onnx import get_default_config, quantize
from quark.report.summary import summary_text

SIZE = 8
HELD_OUT = (7, 15)  # of 16 samples


def network():
    net = Net()
    net.node("MatMul", net.input("x", ("n", SIZE)), net.weight(SIZE, SIZE), output="y")
    return net.model("y")


def samples(*, are_all_loud: bool = False) -> list[np.ndarray]:
    """Large values in the held-out samples and in the first one, which sets the range; others are below a step of 8
    bits."""
    loud = range(16) if are_all_loud else (0, *HELD_OUT)
    rng = np.random.default_rng(0)
    return [rng.normal(0, 1000 if i in loud else 1, (1, SIZE)).astype(np.float32) for i in range(16)]


def quantized(data: list[np.ndarray]):
    config = get_default_config("A8W8")
    config.extra_options["Protect"] = "none"
    return quantize(network(), data, config)


def test_what_fails_on_calibration_samples_is_not_ok() -> None:
    report = quantized(samples()).report
    assert report.calibration.held_out == len(HELD_OUT)
    assert report.calibration.judged == 16
    assert report.verdict is Verdict.COLLAPSED
    assert any("2 held-out samples alone would make it ok" in remark for remark in report.remarks)
    assert "Worst of 16 samples, 2 of them held out" in summary_text(report)


def test_held_out_samples_decide_where_the_others_show_nothing_else() -> None:
    report = quantized(samples(are_all_loud=True)).report
    assert report.verdict is Verdict.OK
    assert report.calibration.judged == 0
    assert "on 2 held-out samples" in summary_text(report)


def test_an_expensive_network_runs_on_held_out_samples_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "VERDICT_MACS", 1)
    report = quantized(samples()).report
    assert report.verdict is Verdict.OK
    assert report.calibration.judged == 0


def test_joining_samples_changes_no_byte_of_an_unprotected_file(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = quantized(samples()).model.SerializeToString()
    monkeypatch.setattr(pipeline, "VERDICT_MACS", 1)
    assert quantized(samples()).model.SerializeToString() == usual
