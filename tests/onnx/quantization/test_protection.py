"""Protection: what 8 bits break is found, kept in a wider type within a budget, and told."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_models import Net
from protected_networks import detector, images, loud_channel, loud_detector

from quark.compare import Verdict
from quark.errors import QuarkError
from quark.onnx import (
    CalibrationMethod,
    QuantizationConfig,
    QuantizedModel,
    QuantType,
    get_default_config,
    quantize,
)
from quark.onnx.deciding import Decision
from quark.report.summary import summary_text

DETECTIONS, MAPS = images((3, 8, 8)), images((3, 16, 16))
POST_PROCESSING = {"sides", "to_pixels", "scores", "joined", "rows"}
FOR_ONNX_RUNTIME = ["INT8_CNN_DEFAULT", "A8W8", "MXINT8"]
ORDER = (Verdict.OK, Verdict.DEGRADED, Verdict.COLLAPSED)


def quantized(model: onnx.ModelProto, data: object, preset: str, fields: Any = None, **options) -> QuantizedModel:
    config = get_default_config(preset)
    config.extra_options.update(options)
    for name, value in (fields or {}).items():
        setattr(config, name, value)
    return quantize(model, data, config)


@pytest.fixture(scope="module")
def protected() -> QuantizedModel:
    """A network with one loud channel, which no range suits."""
    return quantize(loud_channel(), MAPS, "INT8_CNN_DEFAULT")


@pytest.mark.parametrize("preset", ["INT8_CNN_DEFAULT", "A8W8", "U8S8_AAWS", "XINT8", "VINT8"])
def test_a_detection_head_is_protected_without_a_search(preset: str) -> None:
    plain = quantized(detector(), DETECTIONS, preset, Protect="none").report
    report = quantized(detector(), DETECTIONS, preset).report
    assert plain.verdict is Verdict.COLLAPSED
    assert plain.protection is None
    assert report.verdict is Verdict.OK
    assert set(report.protection.structures) == POST_PROCESSING
    assert not report.protection.layers
    reasons = {node.node: node.reason for node in report.plan.skipped}
    assert all(reasons[name].startswith("protected: post-processing") for name in POST_PROCESSING)


def test_protection_of_structures_alone_does_not_search() -> None:
    report = quantized(detector(), DETECTIONS, "INT8_CNN_DEFAULT", Protect="structures").report
    assert set(report.protection.structures) == POST_PROCESSING
    loud = quantized(loud_channel(), MAPS, "INT8_CNN_DEFAULT", Protect="structures").report
    assert loud.protection is None
    assert loud.verdict is not Verdict.OK


def test_what_structures_cost_is_told_without_a_search() -> None:
    net = Net()
    y = net.conv(net.input("x", (1, 3, 8, 8)), (3, 8), pads=[1, 1, 1, 1], name="conv")
    y = net.conv(y, (8, 8), 2, op_type="ConvTranspose", strides=[2, 2], name="up")
    model = net.model(net.conv(y, (8, 4), 1, name="last"))
    facts = quantize(model, DETECTIONS, "INT8_CNN_DEFAULT").report.protection
    macs = {"conv": 3 * 8 * 9 * 64, "up": 8 * 8 * 4 * 64, "last": 8 * 4 * 256}
    assert facts.structures == ("up",)
    assert facts.float_mac_share == pytest.approx(macs["up"] / sum(macs.values()))
    assert facts.extra_weight_bytes == 3 * 8 * 8 * 4


@pytest.mark.parametrize("preset", FOR_ONNX_RUNTIME)
def test_the_layers_that_break_the_network_are_found_by_measuring(preset: str) -> None:
    plain = quantized(loud_channel(), MAPS, preset, Protect="none").report
    report = quantize(loud_channel(), MAPS, preset).report
    assert plain.verdict is Verdict.COLLAPSED
    assert report.verdict is Verdict.OK
    facts = report.protection
    assert "sensitive" in {layer.node for layer in facts.layers}
    assert "sensitive" not in report.quantized_nodes
    assert {"first", "second"} <= set(report.quantized_nodes)  # they have most of the work
    assert "collapsed" in facts.before
    assert "ok" in facts.after
    assert facts.tried
    assert not facts.alternatives


def test_what_was_protected_is_in_the_summary_and_in_the_json(protected: QuantizedModel, tmp_path) -> None:
    path = protected.save(tmp_path / "out.onnx")
    content = json.loads(path.with_suffix(".json").read_text())["protection"]
    assert "sensitive" in {layer["node"] for layer in content["layers"]}
    assert content["float_mac_share"] == pytest.approx(sum(layer["mac_share"] for layer in content["layers"]))
    assert content["extra_weight_bytes"] > 0
    assert len(content["tried"]) == len(set(content["tried"]))
    text = " ".join(summary_text(protected.report).split())
    assert "protected " in text
    assert "'sensitive'" in text


def test_protected_layers_are_float_in_the_file(protected: QuantizedModel) -> None:
    by_name = {node.name: node for node in protected.model.graph.node}
    floats = {each.name for each in protected.model.graph.initializer if each.data_type == onnx.TensorProto.FLOAT}
    assert by_name["sensitive"].input[1] in floats
    assert by_name["second"].input[1] not in floats


@pytest.mark.parametrize(
    ("preset", "budget"), [("INT8_CNN_DEFAULT", 0.0), ("MXINT8", 0.0), ("MXINT8", 0.004), ("MXINT8", 0.15)]
)
def test_layers_found_by_measuring_keep_to_the_budget(preset: str, budget: float) -> None:
    facts = quantized(loud_channel(), MAPS, preset, ProtectBudget=budget).report.protection
    assert sum((layer.mac_share for layer in facts.layers), start=0.0) <= budget
    assert facts.float_mac_share <= budget
    if budget < 0.005:  # the share of `sensitive`
        assert "sensitive" not in {layer.node for layer in facts.layers}
        assert any(alternative.startswith("BF16: ") for alternative in facts.alternatives)


def test_the_same_input_gives_the_same_bytes(protected: QuantizedModel) -> None:
    again = quantize(loud_channel(), MAPS, "INT8_CNN_DEFAULT")
    assert protected.report.protection.layers
    assert protected.model.SerializeToString() == again.model.SerializeToString()
    assert protected.report.protection == again.report.protection


def test_ranges_are_chosen_again_once_layers_are_in_float() -> None:
    report = quantize(loud_detector(), DETECTIONS, "INT8_CNN_DEFAULT").report
    assert report.verdict is Verdict.OK
    assert {"loud", "e"} <= {layer.node for layer in report.protection.layers}
    assert report.protection.tried[-1].startswith("the same layers, ranges as configured: ")
    assert report.protection.methods == {}  # as configured, all of them


@pytest.mark.parametrize("preset", FOR_ONNX_RUNTIME)
def test_a_network_that_8_bits_suit_costs_no_search(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import quark.features.protection.on_onnx as protection

    monkeypatch.setattr(protection, "protect", lambda *_: pytest.fail("searched"))
    found = quantize(loud_channel(1.0), MAPS, preset)
    assert found.report.verdict is Verdict.OK
    assert found.report.protection is None
    plain = quantized(loud_channel(1.0), MAPS, preset, Protect="none")
    assert found.plan.to_json() == plain.plan.to_json()


def test_random_numbers_start_no_search() -> None:
    report = quantize(loud_channel(), None, "INT8_CNN_DEFAULT", use_random_data=True).report
    assert report.calibration.is_random
    assert report.protection is None


def test_a_single_sample_is_enough() -> None:
    report = quantize(loud_channel(), MAPS[:1], "INT8_CNN_DEFAULT").report
    assert report.verdict is Verdict.OK
    assert report.protection.layers


def test_presets_for_an_npu_leave_no_layer_in_float_and_name_presets_that_would_work() -> None:
    # without equalization, which would even the loud channel out
    report = quantized(loud_channel(), MAPS, "XINT8", {"include_cle": False}).report
    assert report.verdict is not Verdict.OK
    assert not report.protection.layers
    assert not report.protection.is_float_between_products
    assert {"first", "second", "wide", "sensitive", "last"} <= set(report.quantized_nodes)
    (named,) = [alternative for alternative in report.protection.alternatives if alternative.startswith("BF16: ")]
    assert "SQNR" in named
    assert "BF16" in summary_text(report)


def test_a_result_that_is_no_better_on_held_out_samples_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import quark.features.protection.on_onnx as protection

    monkeypatch.setattr(protection, "is_better", lambda *_: False)
    found = quantize(loud_channel(), MAPS, "INT8_CNN_DEFAULT")
    plain = quantized(loud_channel(), MAPS, "INT8_CNN_DEFAULT", Protect="none")
    assert found.plan.to_json() == plain.plan.to_json()
    assert found.report.protection.tried
    assert not found.report.protection.layers
    assert not found.report.protection.after


@pytest.mark.parametrize(("gain", "runs"), [(1.0, 1), (500.0, 3)])
def test_a_network_that_8_bits_suit_is_decided_on_once_before_it_is_trained(
    gain: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are trained once as well, as they were protected."""
    import quark.onnx.quantization.pipeline as pipeline

    calls = {"decide": 0, "train": 0}
    steps = {name: getattr(pipeline, name) for name in calls}
    for name in calls:

        def counted(work: Decision, name: str = name) -> Any:
            calls[name] += 1
            return steps[name](work)

        monkeypatch.setattr(pipeline, name, counted)
    config = get_default_config("INT8_CNN_ACCURATE")
    config.extra_options["FastFinetune"]["NumIterations"] = 2
    found = quantize(loud_channel(gain), MAPS, config)
    assert calls == {"decide": runs, "train": 1}
    assert found.report.algorithms[-1].name == "AdaRound"
    assert (found.report.protection is None) is (runs == 1)


def test_a_configuration_of_ones_own_has_no_protection() -> None:
    config = QuantizationConfig(
        calibrate_method=CalibrationMethod.MinMax,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        per_channel=True,
    )
    for model, data in ((detector(), DETECTIONS), (loud_channel(), MAPS)):
        report = quantize(model, data, config).report
        assert report.protection is None
        assert report.verdict is Verdict.COLLAPSED
    config.extra_options["Protect"] = "auto"
    assert quantize(detector(), DETECTIONS, config).report.verdict is Verdict.OK


@pytest.mark.parametrize("preset", ["A16W8", "BF16"])
def test_types_of_16_bits_have_nothing_to_protect_and_say_so(preset: str) -> None:
    report = quantized(detector(), DETECTIONS, preset, Protect="auto").report
    assert report.protection is None
    assert [remark for remark in report.remarks if remark.startswith("Protect: only activations of 8 bits")]
    assert not [remark for remark in quantize(detector(), DETECTIONS, preset).report.remarks if "Protect" in remark]


def test_options_that_cannot_matter_are_remarked_on() -> None:
    budget = quantized(detector(), DETECTIONS, "XINT8", ProtectBudget=0.3).report.remarks
    assert [each for each in budget if each.startswith("ProtectBudget: for an NPU")]
    blocks = quantized(detector(), DETECTIONS, "MXINT8", Protect="structures").report.remarks
    assert [block for block in blocks if block.startswith("Protect 'structures': ")]
    for preset in ("XINT8", "MXINT8"):
        assert not [remark for remark in quantize(detector(), DETECTIONS, preset).report.remarks if "Protect" in remark]


@pytest.mark.parametrize("mode", ["none", "structures"])
def test_a_budget_without_a_search_is_remarked_on(mode: str) -> None:
    report = quantized(detector(), DETECTIONS, "INT8_CNN_DEFAULT", Protect=mode, ProtectBudget=0.3).report
    assert [remark for remark in report.remarks if remark.startswith("ProtectBudget: ")]
    searched = quantized(detector(), DETECTIONS, "INT8_CNN_DEFAULT", ProtectBudget=0.3).report
    assert not [remark for remark in searched.remarks if remark.startswith("ProtectBudget: ")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"Protect": "yes"}, "'Protect'.*auto, structures, none"),
        ({"Protect": True}, "'Protect'"),
        ({"ProtectBudget": 2}, "'ProtectBudget'.*2"),
    ],
)
def test_errors_name_the_option(options: dict[str, object], expected: str) -> None:
    with pytest.raises(QuarkError, match=expected):
        quantized(detector(), DETECTIONS, "INT8_CNN_DEFAULT", **options)


def test_results_stay_finite(protected: QuantizedModel) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(protected.model.SerializeToString(), providers=["CPUExecutionProvider"])
    assert all(np.isfinite(session.run(None, sample)[0]).all() for sample in MAPS[:3])
