"""Mixed precision from model and samples to the quantized network, with ONNX Runtime as the judge."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import onnxruntime
import pytest
from mixed_networks import BF16, BFP, CLASSES, LAYERS, MX, S8, S16, images, mixed_config, mixed_network

import quark.onnx.deciding as measuring
from quark.errors import InvalidValueError, MissingDependencyError, ModelError, QuarkError, UnknownNameError
from quark.features.mixed_precision.networks import MixedNetworks
from quark.features.mixed_precision.plan import MixedPlan
from quark.onnx import ModelQuantizer, get_library_path, quantize
from quark.onnx.calibrate import calibrate
from quark.onnx.quantization.config.data_type import BFP16, MXFP4E2M1, MXFP8E4M3, MXInt8
from quark.plan import Role
from quark.report.summary import summary_text

torch = pytest.importorskip("torch")

MX_PAIR = {"TargetMXAttributes": dict(MXFP4E2M1.attributes)}
PAIRS = {
    "A16W16_A8W16": ((S16, S16), (S8, S16), {}, {}),
    "A16W16_A16W8": ((S16, S16), (S16, S8), {}, {}),
    "A16W16_A8W8": ((S16, S16), (S8, S8), {}, {}),
    "A16W8_A8W8": ((S16, S8), (S8, S8), {}, {}),
    "A8W16_A8W8": ((S8, S16), (S8, S8), {}, {}),
    "BF16_BFP16": ((BF16, BF16), (BFP, BFP), {"BFPAttributes": dict(BFP16.attributes)}, {}),
    "BF16_MXINT8": ((BF16, BF16), (MX, MX), {"MXAttributes": dict(MXInt8.attributes)}, {}),
    "MXFP8_MXFP4": ((MX, MX), (MX, MX), {"MXAttributes": dict(MXFP8E4M3.attributes)}, MX_PAIR),
}


def session(model):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(get_library_path())
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def outputs(model, samples):
    opened = session(model)
    return np.concatenate([opened.run(["logits"], sample)[0] for sample in samples])


def mixed(config, data=None):
    return quantize(mixed_network(), images() if data is None else data, config)


def read_formats(report, layer):
    """What a layer reads: the formats of its activation and its weight."""
    found = {}
    for tensor in report.plan:
        if any(reader.node == layer for reader in tensor.readers) and tensor.role in (Role.ACTIVATION, Role.WEIGHT):
            found[tensor.role] = tensor.choice.format
    return found[Role.ACTIVATION], found[Role.WEIGHT]


@pytest.mark.parametrize("pair", PAIRS)
def test_lowered_layers_have_the_lower_types_and_others_the_higher(pair):
    high, low, extra, settings = PAIRS[pair]
    report = mixed(mixed_config(high, low, extra=extra, NumTarget=2, **settings)).report
    lowered = report.mixed.lowered
    assert len(lowered) == 2
    types = (
        {read_formats(report, layer) for layer in lowered},
        {read_formats(report, n) for n in LAYERS if n not in lowered},
    )
    assert all(len(each) == 1 for each in types)
    assert types[0] != types[1]
    least = sorted(report.mixed.layers, key=lambda layer: layer.sensitivity)[:2]
    assert {each.layer for each in least} == set(lowered)


@pytest.mark.parametrize("pair", ["A16W8_A8W8", "MXFP8_MXFP4"])
def test_sensitivities_are_those_of_the_layer_alone(pair):
    high, low, extra, settings = PAIRS[pair]
    model, data = mixed_network(), images(16)
    options = {**extra, "CalibDataSize": 15}
    report = quantize(model, data, mixed_config(high, low, extra=options, NumTarget=1, **settings)).report
    name = report.mixed.lowered[0]
    # the same layer lowered by hand: all others excluded
    config = mixed_config(low, low, extra={**extra, "MXAttributes": settings.get("TargetMXAttributes", {})})
    config.include_auto_mp = False
    del config.extra_options["AutoMixprecision"]
    config.nodes_to_quantize = [name]
    alone = quantize(model, data, config).model
    y, z = outputs(model, data[:15]), outputs(alone, data[:15])
    expected = float(((y - z) ** 2).sum() / (y**2).sum())
    found = {layer.layer: layer.sensitivity for layer in report.mixed.layers}[name]
    assert found is not None
    # by hand its output is quantized too, for every reader
    assert found <= expected * 1.01 if pair == "A16W8_A8W8" else found == pytest.approx(expected, rel=1e-3)


def test_the_layer_that_8_bits_harm_stays_high():
    report = mixed(mixed_config(SQNRTarget=28.0)).report
    plan = report.mixed
    assert max(plan.layers, key=lambda layer: layer.sensitivity).layer == "sensitive"
    assert "sensitive" not in plan.lowered
    assert plan.lowered
    assert not plan.missed


@pytest.mark.parametrize("target", [{"SQNRTarget": 28.0}, {"L2Target": 0.5}])
def test_the_figure_is_that_of_the_network_that_comes_out(target):
    model, data = mixed_network(), images(16)
    result = quantize(model, data, mixed_config(extra={"CalibDataSize": 15}, **target))
    y, z = outputs(model, data[:15]), outputs(result.model, data[:15])
    (figure,) = result.report.mixed.figures
    sqnr = 10 * np.log10((y**2).sum() / ((y - z) ** 2).sum())
    expected = sqnr if "SQNRTarget" in target else np.linalg.norm(y - z, axis=1).mean()
    assert figure.value == pytest.approx(expected, rel=1e-3)
    assert figure.is_met


@pytest.mark.parametrize("inputs", ["float", "quantized"])
def test_figures_are_those_of_corrected_biases(inputs, tmp_path):
    model, data, path = mixed_network(), images(16), tmp_path / "plan.json"
    correction = {"BiasCorrection": True, "BiasCorrectionInputs": inputs}
    config = mixed_config(extra={"CalibDataSize": 15, **correction}, L2Target=0.5, PlanFile=path)
    result = quantize(model, data, config)
    y, z = outputs(model, data[:15]), outputs(result.model, data[:15])
    assert result.report.mixed.figures[0].value == pytest.approx(np.linalg.norm(y - z, axis=1).mean(), rel=1e-3)
    assert MixedPlan.from_json(path.read_text()) == result.report.mixed


def test_the_function_sees_all_outputs_in_the_order_of_the_reader():
    model, data = mixed_network(), images(20)
    seen = []

    def evaluate(outputs):
        seen.append(outputs)
        return 0.5

    mixed(mixed_config(Top1AccTarget=0.1, EvaluateFunction=evaluate), data)
    assert all(isinstance(each, torch.Tensor) for each in seen)
    assert all(tuple(each.shape) == (20, CLASSES) for each in seen)
    np.testing.assert_allclose(seen[0].numpy(), outputs(model, data), rtol=1e-4, atol=1e-5)
    assert len(seen) == 2  # float, and all layers lowered, which is good enough


def labels_of(data):
    return torch.from_numpy(outputs(mixed_network(), data).argmax(1))


@pytest.mark.parametrize("drop", [0.0, 0.2])
def test_accuracy_falls_by_no_more_than_is_accepted(drop):
    data = images(40)
    labels = labels_of(data)
    result = mixed(
        mixed_config(Top1AccTarget=drop, EvaluateFunction=lambda y: (y.argmax(1) == labels).float().mean()), data
    )
    figure = result.report.mixed.figures[0]
    assert figure.reference == 1.0
    assert figure.value >= 1.0 - drop - 1e-9
    actual = (outputs(result.model, data).argmax(1) == labels.numpy()).mean()
    assert figure.value == pytest.approx(actual)


def test_a_target_out_of_reach_keeps_all_high_and_says_both_numbers():
    report = mixed(mixed_config(SQNRTarget=200.0)).report
    assert report.mixed.lowered == ()
    (remark,) = [remark for remark in report.remarks if "wanted" in remark]
    assert re.search(
        r"SQNR \d+\.\d dB, wanted at least 200.0 dB: it is not reached even with all layers in int16", remark
    )


def test_budgets_are_kept_to_with_the_least_harm():
    plans = {}
    for method in ("greedy", "integer"):
        config = mixed_config((S16, S16), (S8, S8), BitsTarget=11.0, Method=method)
        plans[method] = mixed(config).report.mixed
    for plan in plans.values():
        weights = sum(layer.weights for layer in plan.layers)
        bits = sum(layer.weights * (8 if layer.layer in plan.lowered else 16) for layer in plan.layers) / weights
        assert plan.figures[0].value == pytest.approx(bits)
        assert bits <= 11.0
    harm = {
        name: sum(layer.sensitivity for layer in plan.layers if layer.layer in plan.lowered)
        for name, plan in plans.items()
    }
    assert harm["integer"] <= harm["greedy"]


def test_bit_operations_are_a_share_of_all_high():
    plan = mixed(mixed_config(BitOperationsTarget=0.8, Method="integer", L2Target=1e-9)).report.mixed
    total = sum(layer.macs for layer in plan.layers)
    share = sum(layer.macs * (0.5 if layer.layer in plan.lowered else 1.0) for layer in plan.layers) / total
    assert plan.figures[0].value == pytest.approx(share)
    assert share <= 0.8
    assert [figure.metric.value for figure in plan.missed] == ["L2 distance"]


def test_a_budget_out_of_reach_lowers_all_and_says_so():
    report = mixed(mixed_config((S16, S16), (S8, S8), BitsTarget=4.0)).report
    assert set(report.mixed.lowered) == set(LAYERS)
    assert any("bits per weight 16 -> 8, wanted at most 4: it cannot be reached" in remark for remark in report.remarks)


def test_two_runs_give_the_same_bytes(tmp_path):
    contents = []
    for number in range(2):
        plan, folder = tmp_path / "plan.json", tmp_path / str(number)
        folder.mkdir()
        path = mixed(mixed_config(SQNRTarget=28.0, PlanFile=plan)).save(folder / "out.onnx")
        contents.append((path.read_bytes(), path.with_suffix(".json").read_bytes(), plan.read_bytes()))
        plan.unlink()
    assert contents[0] == contents[1]


def test_ranges_are_measured_once(monkeypatch):
    measured: list[Any] = []
    original = calibrate

    def counting(runner, wanted, *rest):
        measured.extend((name, each.integer.name) for name, each in wanted.items())
        return original(runner, wanted, *rest)

    monkeypatch.setattr(measuring, "calibrate", counting)
    mixed(mixed_config(SQNRTarget=28.0))
    assert len(measured) == len(set(measured))


def test_sensitivities_of_the_plan_file_are_used_again(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    config = mixed_config(SQNRTarget=28.0, PlanFile=str(path))
    first = mixed(config).report.mixed
    assert MixedPlan.from_json(path.read_text()) == first
    alone = MixedNetworks.alone
    monkeypatch.setattr(MixedNetworks, "alone", None)
    again = mixed(config).report
    assert again.mixed == first
    assert again.remarks == ()
    monkeypatch.setattr(MixedNetworks, "alone", alone)
    other = mixed(config, images(seed=9)).report
    assert any("measured again" in remark for remark in other.remarks)
    assert other.mixed.basis != first.basis


def test_choices_are_edited_by_hand(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    mixed(mixed_config(NumTarget=1, PlanFile=path))
    text = path.read_text().replace('"choice": "low"', '"choice": "high"')
    path.write_text(re.sub(r'(\{"layer": "sensitive".*"choice": )"high"', r'\1"low"', text))
    monkeypatch.setattr(MixedNetworks, "alone", None)  # nothing is measured
    report = mixed(mixed_config(PlanFile=path, UsePlan=True)).report
    assert report.mixed.lowered == ("sensitive",)
    assert read_formats(report, "sensitive") == ("int8", "int8")
    assert read_formats(report, "third") == ("int16", "int8")
    assert report.remarks == ()


def test_a_plan_for_other_layers_types_or_models_is_noticed(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"high": "int32", "measured": {"model": "?"}, "layers": [{"layer": "head", "choice": "low"}]}')
    report = mixed(mixed_config(PlanFile=path, UsePlan=True)).report
    assert report.mixed.lowered == ("head",)
    for part in ("says nothing of 4 layers", "another model", "made for 'int32'"):
        assert any(part in remark for remark in report.remarks)
    path.write_text('{"layers": [{"layer": "heat", "choice": "low"}]}')
    with pytest.raises(UnknownNameError, match="'heat'. Did you mean head"):
        mixed(mixed_config(PlanFile=path, UsePlan=True))


@pytest.mark.parametrize("use", [True, False])
def test_a_file_that_is_no_plan_is_named_and_kept(tmp_path, use):
    path = tmp_path / "plan.json"
    path.write_text("something else")
    with pytest.raises(InvalidValueError, match=r"plan\.json.*not valid JSON"):
        mixed(mixed_config(PlanFile=path, UsePlan=use, NumTarget=1))
    assert path.read_text() == "something else"


def test_files_that_cannot_be(tmp_path):
    with pytest.raises(InvalidValueError, match="no such file"):
        mixed(mixed_config(PlanFile=tmp_path / "none.json", UsePlan=True))
    with pytest.raises(InvalidValueError, match="no folder"):
        mixed(mixed_config(PlanFile=tmp_path / "none" / "plan.json", NumTarget=1))


def test_a_run_that_breaks_off_leaves_the_best_plan_so_far(tmp_path):
    path = tmp_path / "plan.json"
    values = iter([1.0, 0.5, 1.0])  # float, all lowered, half of them

    def evaluate(outputs):
        value = next(values, None)
        if value is None:
            raise KeyboardInterrupt
        return value

    with pytest.raises(KeyboardInterrupt):
        mixed(mixed_config(Top1AccTarget=0.1, EvaluateFunction=evaluate, PlanFile=path))
    plan = MixedPlan.from_json(path.read_text())
    assert len(plan.lowered) == 2
    assert plan.figures[0].value == 1.0
    assert all(layer.sensitivity is not None for layer in plan.layers)


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (lambda y: 1 / 0, r"EvaluateFunction '<lambda>' failed .*shape \(24, 5\).*ZeroDivisionError"),
        (lambda y: float("nan"), "returned nan"),
        (lambda y: None, "returned None of type NoneType"),
        (lambda y: "0.7", "returned '0.7' of type str"),
        (lambda y: y, "of type Tensor: expected a number"),
        (lambda y: True, "returned True"),
    ],
)
def test_functions_that_fail_or_give_no_number_are_named(evaluate, message):
    with pytest.raises(QuarkError, match=message) as error:
        mixed(mixed_config(Top1AccTarget=0.1, EvaluateFunction=evaluate))
    assert "ZeroDivision" not in message or isinstance(error.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "value", [1, 1.0, np.float32(1), np.ones(()), torch.tensor(1.0), torch.ones(1), np.int64(1)], ids=repr
)
def test_numbers_of_all_kinds_are_fine(value):
    report = mixed(mixed_config(Top1AccTarget=0, EvaluateFunction=lambda y: value), images(3)).report
    assert report.mixed.figures[0].value == 1.0


def test_without_torch_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(MissingDependencyError, match="pip install torch"):
        mixed(mixed_config(Top1AccTarget=0.1, EvaluateFunction=lambda y: 1.0))
    assert mixed(mixed_config(SQNRTarget=10.0)).report.mixed.lowered


def test_an_output_that_is_not_there_is_an_error():
    with pytest.raises(InvalidValueError, match="OutputIndex 1: the model has 1 outputs, expected one of 0: 'logits'"):
        mixed(mixed_config(SQNRTarget=10.0, OutputIndex=1))


def test_shapes_that_are_not_known_cannot_be_counted():
    model = mixed_network()
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    with pytest.raises(ModelError, match="BitOperationsTarget: the shapes around layer 'first'"):
        quantize(model, images(), mixed_config(BitOperationsTarget=0.7))


def test_a_model_without_such_layers_says_so():
    report = mixed(mixed_config(SQNRTarget=10.0, TargetOpType=["LeakyRelu"])).report
    assert report.mixed.layers == ()
    assert any("mixed precision found nothing to do" in remark for remark in report.remarks)


def test_operators_without_weights_can_be_lowered_too():
    report = mixed(mixed_config(SQNRTarget=10.0, TargetOpType=["Conv", "Flatten", "GlobalAveragePool"])).report
    assert {layer.op_type for layer in report.mixed.layers} == {"Conv", "Flatten", "GlobalAveragePool"}
    assert not report.mixed.missed


def test_random_data_do():
    report = quantize(mixed_network(), None, mixed_config(SQNRTarget=20.0), use_random_data=True).report
    assert report.mixed.lowered
    assert any("random numbers" in remark for remark in report.remarks)


def test_a_lone_sample_does():
    assert mixed(mixed_config(SQNRTarget=10.0), images(1)).report.mixed.lowered


def test_the_report_has_all_layers_and_the_summary_the_line(tmp_path):
    result = mixed(mixed_config(SQNRTarget=28.0))
    content = json.loads(result.save(tmp_path / "out.onnx").with_suffix(".json").read_text())
    assert [each["layer"] for each in content["mixed_precision"]["layers"]] == list(LAYERS)
    text = " ".join(summary_text(result.report, 200).split())
    count = len(result.report.mixed.lowered)
    assert f"mixed precision: {count} of 5 layers in int8, {5 - count} in int16 activations, int8 weights; SQNR" in text
    assert "layer sensitivity choice" in text
    assert "high: int16 activations, int8 weights" in text


def test_the_quantizer_of_the_documents_takes_it():
    data = images(12)
    labels = labels_of(data).tolist()

    def top1_acc(outputs):
        _, preds = torch.max(outputs, 1)
        return sum(int(a == b) for a, b in zip(preds, labels, strict=True)) / len(preds)

    config = mixed_config(OutputIndex=0, Top1AccTarget=0.1, EvaluateFunction=top1_acc, extra={"Int32Bias": False})
    model = ModelQuantizer(config).quantize_model(mixed_network(), calibration_data_reader=iter(data))
    assert outputs(model, data).shape == (12, CLASSES)
