"""Compensation of ONNX networks: closer to the float network, on the plan's grid, in every format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper
from onnx_models import Net, run_model

import quark.features.bias_correction.on_onnx as bias_correction
import quark.features.compensation.layers as layers
import quark.features.compensation.on_onnx as compensation
from quark.compare.improvement import OutputErrors
from quark.demo import network_path
from quark.demo.digits import load_digits
from quark.errors import InvalidValueError
from quark.features.compensation.options import CompensationOptions
from quark.onnx import get_default_config, quantize

SHAPE = (1, 6, 12, 12)


def network():
    """Ordinary, grouped, depthwise and transposed convolutions, a Gemm and a MatMul."""
    net = Net(seed=3)
    x = net.node("Conv", net.input("x", SHAPE), net.weight(16, 6, 3, 3), pads=[1, 1, 1, 1])
    x = net.node("Conv", net.node("Relu", x), net.weight(16, 1, 3, 3), group=16)
    x = net.node("Conv", x, net.weight(16, 4, 1, 1), group=4)
    x = net.node("ConvTranspose", net.node("Relu", x), net.weight(16, 8, 2, 2), strides=[2, 2])
    x = net.node("Flatten", net.node("GlobalAveragePool", x))
    x = net.node("Gemm", x, net.weight(8, 40), net.constant(np.zeros(40, np.float32)))
    x = net.node("MatMul", net.node("Relu", x), net.weight(40, 10))
    return net.model(net.node("Reshape", x, net.constant(np.array([1, 2, 5, 1]))))  # not the scores of classes


def samples(count: int = 48):
    """Neighbouring numbers and channels vary together, as in images."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(count, *SHAPE)).astype(np.float32)
    smooth = noise + np.roll(noise, 1, -1) + np.roll(noise, 1, -2) + noise.mean(axis=2, keepdims=True) * 2
    return [{"x": each} for each in smooth]


def result(preset: str, **options):
    config = get_default_config(preset)
    config.print_summary = False
    config.include_cle = False
    config.extra_options.update({"BiasCorrection": False, "Protect": "none", **options})
    return quantize(network(), samples(), config)


def sqnr(of) -> float:
    return min(output.sqnr_db for output in of.report.outputs)


def facts(of):
    return next(algorithm for algorithm in of.report.algorithms if algorithm.name == "compensation")


@pytest.mark.parametrize(("preset", "gain"), [
    ("A8W8", 2.0), ("U8U8_AAWA", 2.0), ("MXFP4E2M1", 2.0), ("MX4", 2.0), ("MXINT8", 2.0), ("BF16", 1.0),
])  # fmt: skip
def test_the_network_gets_closer(preset, gain):
    plain, made_up = (result(preset, WeightsOnly=True, Compensation=value) for value in (False, True))
    assert len(facts(made_up).changed) == 6
    assert facts(made_up).left == ()
    assert sqnr(made_up) > sqnr(plain) + gain


def test_every_layer_loses_less_than_by_plain_rounding_and_the_bytes_are_the_same_each_time():
    first, second = (result("MXFP6E2M3", Compensation=True) for _ in range(2))
    shares = [float(each.split("error ")[1].split()[0]) for each in facts(first).changed]
    assert max(shares) < 0.95
    assert first.model.SerializeToString() == second.model.SerializeToString()


def test_little_memory_changes_how_many_layers_are_rounded_at_a_time_and_no_bytes(monkeypatch):
    usual, at_a_time = result("MXFP6E2M3", Compensation=True), []
    of_this = compensation._layers_at_a_time

    def noting(sums):
        at_a_time.append(of_this(sums))
        return at_a_time[-1]

    monkeypatch.setattr(compensation, "_layers_at_a_time", noting)
    monkeypatch.setattr(compensation, "free_memory", lambda: 1)
    scarce = result("MXFP6E2M3", Compensation=True)
    assert set(at_a_time) == {1}
    assert scarce.model.SerializeToString() == usual.model.SerializeToString()
    assert facts(scarce).changed == facts(usual).changed


def test_the_alpha_of_a_gemm_comes_after_the_rounding_of_its_input():
    found = []
    for alpha in (1.0, 0.25, 4.0):
        net = Net(seed=3)
        model = net.model(net.node("Gemm", net.input("x", (8, 16)), net.weight(16, 6), alpha=alpha))
        data = [{"x": each} for each in np.random.default_rng(0).normal(size=(8, 8, 16)).astype(np.float32)]
        config = get_default_config("S8S8_AAWS")
        config.print_summary = False
        config.extra_options["Compensation"] = True
        found.append(sqnr(quantize(model, data, config)))
    assert found == pytest.approx([found[0]] * 3, abs=0.1)


def test_biases_are_corrected_for_the_weights_that_are_stored():
    options = {"WeightsOnly": True, "Compensation": True}
    plain, corrected = (result("MX4", **options, BiasCorrection=value) for value in (False, True))
    assert len(facts(corrected).changed) == 6
    assert sqnr(corrected) > sqnr(plain) - 0.5


def test_without_data_nothing_is_done_and_the_report_says_so():
    config = get_default_config("A8W8")
    config.print_summary = False
    config.extra_options.update(Compensation=True, UseRandomData=True)
    found = facts(quantize(network(), None, config))
    assert found.changed == ()
    assert "no calibration data" in found.left[0].reason


def test_wrong_settings_are_refused():
    with pytest.raises(InvalidValueError, match="CompensationDamping 0"):
        CompensationOptions(damping=0.0)
    with pytest.raises(InvalidValueError, match="CompensationSamples 0"):
        CompensationOptions(sample_limit=0)


def test_it_is_taken_back_if_the_network_gets_worse(monkeypatch):
    errors = iter([OutputErrors([1.0], [1.0]), OutputErrors([2.0], [1.0])])
    monkeypatch.setattr(compensation, "quantized_errors", lambda work: next(errors))
    found = result("MXFP4E2M1", WeightsOnly=True, Compensation=True)
    assert facts(found).changed == ()
    assert {each.reason for each in facts(found).left} == {"the outputs on held-out samples got worse with it"}
    weights, plain = (
        {each.name: each.raw_data for each in of.model.graph.initializer}
        for of in (found, result("MXFP4E2M1", WeightsOnly=True, Compensation=False))
    )
    assert weights == plain


def test_correlations_that_are_chance_do_no_harm():
    """There are fewer rows than channels, which vary independently: any correlation is chance."""
    net = Net(seed=3)
    y = net.node("MatMul", net.input("x", (1, 4, 64)), net.weight(64, 48, name="w"), name="p", output="y")
    model = net.model(y)
    rng = np.random.default_rng(0)
    few = [{"x": each} for each in rng.normal(size=(8, 1, 4, 64)).astype(np.float32)]
    fresh = rng.normal(size=(300, 64))
    weight = numpy_helper.to_array(next(each for each in model.graph.initializer if each.name == "w"))
    errors = []
    for preset in ("INT4_WEIGHT_ONLY", "INT4_WEIGHT_ONLY_GPTQ"):
        config = get_default_config(preset)
        config.print_summary = False
        made = quantize(model, few, config).model
        rows = np.eye(64, dtype=np.float32).reshape(16, 1, 4, 64)
        numbers = np.concatenate([run_model(made, {"x": row})["y"][0] for row in rows])
        errors.append(np.square(fresh @ (numbers - weight)).sum())
    assert errors[1] < 1.02 * errors[0]


def test_few_samples_of_one_kind_do_less_harm_to_others(monkeypatch):
    """Inputs lie near six directions that are the same in all eight samples, and others in the inputs that follow."""
    net = Net(seed=3)
    y = net.node("MatMul", net.input("x", (1, 64, 64)), net.weight(64, 48, name="w"), name="p", output="y")
    model = net.model(y)
    rng = np.random.default_rng(0)

    def near(directions, count):
        return rng.normal(size=(count, 6)) @ directions + 0.1 * rng.normal(size=(count, 64))

    own, others = rng.normal(size=(6, 64)), rng.normal(size=(5, 6, 64))
    few = [{"x": near(own, 64)[None].astype(np.float32)} for _ in range(8)]
    fresh = np.concatenate([near(other, 300) for other in others])
    weight = numpy_helper.to_array(next(each for each in model.graph.initializer if each.name == "w"))
    errors = []
    for share in (layers.SHARE_OF_ONE_SAMPLE, 1e-9):
        monkeypatch.setattr(layers, "SHARE_OF_ONE_SAMPLE", share)
        config = get_default_config("INT4_WEIGHT_ONLY_GPTQ")
        config.print_summary = False
        found = run_model(quantize(model, few, config).model, {"x": np.eye(64, dtype=np.float32)[None]})["y"][0]
        errors.append(np.square(fresh @ (found - weight)).sum())
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("preset", ["XINT8", "MX6"])
def test_biases_are_corrected_once_before_and_once_after_compensation(
    monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    calls = []
    correct = bias_correction._correct_in_place

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return correct(*arguments)

    monkeypatch.setattr(bias_correction, "_correct_in_place", counted)
    quantize(network_path(), load_digits()[0].images[:32], preset)
    assert len(calls) == 2  # the last correction is one of these
