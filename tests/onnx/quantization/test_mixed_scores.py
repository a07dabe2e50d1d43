"""Mixed precision by scores, in groups, upward, by numbers and by names, as AutoMixprecisionConfig asks for it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import onnxruntime
import pytest
from mixed_networks import LAYERS, S8, S16, images, mixed_config, mixed_network

from quark.errors import InvalidValueError, UnknownNameError, UnsupportedTypeError
from quark.features.mixed_precision.options import Score, ScoreKind
from quark.features.mixed_precision.scores import score_of
from quark.onnx import quantize
from quark.onnx.quantization.config import QConfig
from quark.onnx.quantization.config.algorithm import AutoMixprecisionConfig
from quark.onnx.quantization.config.spec import (
    CalibMethod,
    Int8Spec,
    Int16Spec,
    MXFP4E2M1Spec,
    QLayerConfig,
    QuantGranularity,
    XInt8Spec,
)
from quark.plan import Role

CHANNELS = Int8Spec(quant_granularity=QuantGranularity.Channel)


def layer(activation: Any, weight: Any = CHANNELS) -> QLayerConfig:
    return QLayerConfig(activation=activation(calibration_method=CalibMethod.MinMax), weight=weight)


HIGH, LOW = layer(Int16Spec), layer(Int8Spec)
SAMPLES = images(8)


def mixed(base: QLayerConfig = HIGH, target: Any = LOW, **settings: Any) -> Any:
    return quantize(mixed_network(), SAMPLES, QConfig(base, algo_config=[AutoMixprecisionConfig(target, **settings)]))


def by_keys(**settings: Any) -> Any:
    return quantize(mixed_network(), SAMPLES, mixed_config((S16, S8), (S8, S8), **settings))


def changed(result: Any) -> dict[str, str]:
    """The layers that were given other types, with these types."""
    facts = next(algorithm for algorithm in result.report.algorithms if algorithm.name == "mixed precision")
    return dict(each.split(": ", 1) for each in facts.changed)


def activations(result: Any) -> dict[str, str]:
    """The format of what each layer reads."""
    plan = [tensor for tensor in result.report.plan if tensor.role is Role.ACTIVATION]
    return {reader.node: tensor.choice.format for tensor in plan for reader in tensor.readers if reader.node in LAYERS}


# ---------------------------------------------------------------- scores
Y = [np.array([3.0, 4.0], np.float32), np.array([0.0, 2.0], np.float32)]
Z = [np.array([3.0, 3.0], np.float32), np.array([0.0, 2.0], np.float32)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ScoreKind.L2, 0.5),
        (ScoreKind.COSINE, (1 - 21 / (5 * np.sqrt(18))) / 2),
        (ScoreKind.KL, (3 / 7 * np.log(6 / 7) + 4 / 7 * np.log(8 / 7)) / 2),
    ],
)
def test_scores_are_means_over_samples(kind: ScoreKind, expected: float) -> None:
    assert score_of(Score(kind), lambda: iter(Y), iter(Z)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"), [(ScoreKind.SQNR, -10 * np.log10(25)), (ScoreKind.PSNR, -10 * np.log10(32))]
)
def test_decibels_have_the_other_sign(kind: ScoreKind, expected: float) -> None:
    assert score_of(Score(kind), lambda: iter(Y[:1]), iter(Z[:1])) == pytest.approx(expected)


def test_functions_get_a_list_of_outputs_for_each_sample_in_their_order() -> None:
    seen: list[Any] = []

    def distance(exact: Any, quantized: Any) -> float:
        seen.append((exact, quantized))
        return float(np.mean([np.abs(a[0] - b[0]).mean() for a, b in zip(exact, quantized, strict=True)]))

    result = mixed(metric_distance_fn=distance, metric_threshold=1e9)
    session = onnxruntime.InferenceSession(mixed_network().SerializeToString(), providers=["CPUExecutionProvider"])
    for exact, _ in seen:
        assert [len(each) for each in exact] == [1] * len(SAMPLES)
        for sample, each in zip(SAMPLES, exact, strict=True):
            np.testing.assert_allclose(each[0], session.run(None, sample)[0], rtol=1e-5, atol=1e-5)
    assert len(changed(result)) == len(LAYERS)
    assert result.report.mixed.figures[0].value == distance(*seen[-1])


def test_an_evaluation_may_lose_so_much() -> None:
    """The share of samples whose outputs are exactly those of the float network: any layer that is mixed loses all."""
    session = onnxruntime.InferenceSession(mixed_network().SerializeToString(), providers=["CPUExecutionProvider"])
    exact = [session.run(None, sample)[0] for sample in SAMPLES]

    def share(found: Any) -> float:
        return float(np.mean([np.allclose(each[0], y, atol=1e-6) for each, y in zip(found, exact, strict=True)]))

    assert changed(mixed(metric_evaluate_fn=share, metric_threshold=0.5)) == {}
    assert len(changed(mixed(metric_evaluate_fn=share, metric_threshold=1.0))) == len(LAYERS)


@pytest.mark.parametrize(("value", "error"), [("much", UnsupportedTypeError), (float("nan"), InvalidValueError)])
def test_a_function_has_to_return_a_number(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="MetricDistanceFn"):
        mixed(metric_distance_fn=lambda exact, quantized: value)


# ---------------------------------------------------------------- how far
def test_without_a_limit_all_layers_are_mixed_and_with_none_at_all_none() -> None:
    everything, nothing = mixed(), mixed(metric_threshold=None)
    assert set(changed(everything)) == set(LAYERS)
    assert changed(nothing) == {}
    assert all(layer.score is not None for layer in nothing.report.mixed.layers)
    assert set(activations(nothing).values()) == {"int16"}


def test_speed_stops_below_the_threshold_and_quality_above_it() -> None:
    scores = {layer.layer: layer.score for layer in mixed(metric_threshold=None).report.mixed.layers}
    assert max(scores, key=lambda name: scores[name]) == "sensitive"
    limit = 0.8 * scores["sensitive"]
    down = mixed(metric_threshold=limit)
    assert "sensitive" not in changed(down)
    assert len(changed(down)) >= 2
    assert down.report.mixed.figures[0].value <= limit
    up = mixed(LOW, HIGH, metric_threshold=limit, metric_optimize_object="quality")
    assert "sensitive" in changed(up)
    assert len(changed(up)) <= 2
    assert up.report.mixed.figures[0].value <= limit
    assert activations(up)["sensitive"] == "int16"
    assert activations(up)["first"] == "int8"


def test_quality_that_is_good_enough_changes_nothing() -> None:
    assert changed(mixed(LOW, HIGH, metric_threshold=1e9, metric_optimize_object="quality")) == {}


def test_each_layer_gets_the_best_of_several_types() -> None:
    coarse = layer(MXFP4E2M1Spec, MXFP4E2M1Spec())
    config = changed(mixed(target=[coarse, LOW]))
    assert set(config) == set(LAYERS)
    assert config["first"] == "int8"
    assert set(changed(mixed(target=[coarse])).values()) == {"mxfp4_e2m1"}


def test_layers_get_types_by_name() -> None:
    config = changed(mixed(target={layer(MXFP4E2M1Spec, MXFP4E2M1Spec()): ["third"], LOW: []}))
    result = mixed(target={layer(MXFP4E2M1Spec, MXFP4E2M1Spec()): ["third"], LOW: []})
    assert set(config) == set(LAYERS)
    assert activations(result) == {**dict.fromkeys(LAYERS, "int8"), "third": "mxfp4_e2m1"}
    with pytest.raises(UnknownNameError, match="Did you mean third"):
        mixed(target={LOW: ["thirt"]})


# ---------------------------------------------------------------- which layers
def test_numbers_are_those_of_layers_in_the_order_of_the_graph() -> None:
    assert set(changed(by_keys(TargetIndices=[0, 3]))) == {"first", "third"}
    assert set(changed(by_keys(ExcludeIndices=[2]))) == set(LAYERS) - {"sensitive"}
    beyond = by_keys(TargetIndices=[1, 9])
    assert set(changed(beyond)) == {"second"}
    assert any("TargetIndices 9: there are 5 layers" in remark for remark in beyond.report.remarks)


def test_tensors_by_name_get_the_type_without_a_search() -> None:
    graph = mixed_network().graph
    tensor = next(each.input[0] for each in graph.node if each.name == "third")
    result = by_keys(TargetTensors=[tensor])
    assert activations(result) == {**dict.fromkeys(LAYERS, "int16"), "third": "int8"}
    assert activations(by_keys(TargetTensors=["second"]))["second"] == "int8"
    with pytest.raises(UnknownNameError, match="TargetTensors"):
        by_keys(TargetTensors=["nowhere"])


def test_layers_of_a_subgraph_are_mixed_together(tmp_path: Any) -> None:
    path = tmp_path / "parts.json"
    path.write_text(
        json.dumps({"subgraphs": [{"name": "middle", "start_nodes": ["second"], "end_nodes": ["sensitive"]}]})
    )
    scores = mixed(subgraph_json=path, metric_threshold=None).report.mixed.layers
    found = {score.layer: score.score for score in scores}
    assert found["second"] == found["sensitive"]
    assert found["first"] == found["third"] == found["head"] != found["second"]
    limit = 1.5 * found["first"]
    assert set(changed(mixed(subgraph_json=path, metric_threshold=limit))) == {"first", "third", "head"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"subgraphs": [], "num_subgraphs": 2}, "num_subgraphs is 2"),
        ({"subgraphs": [{"name": "a", "start_nodes": ["firts"], "end_nodes": []}]}, "Did you mean first"),
        ({"subgraphs": [{"name": "a"}]}, "start_nodes"),
        ({}, "subgraphs"),
    ],
)
def test_mistakes_in_the_file_of_subgraphs_are_named(content: Any, message: str, tmp_path: Any) -> None:
    path = tmp_path / "parts.json"
    path.write_text(json.dumps(content))
    with pytest.raises((InvalidValueError, UnknownNameError), match=message):
        mixed(subgraph_json=path)


def test_layers_that_share_their_input_stay_if_asked_for() -> None:
    network = mixed_network()
    node = next(each for each in network.graph.node if each.name == "third")
    extra = network.graph.node.add()
    extra.CopyFrom(node)
    extra.name, extra.output[0] = "beside", "beside_output"
    network.graph.output.add().CopyFrom(network.graph.output[0])
    network.graph.output[1].name = "beside_output"
    network.graph.output[1].ClearField("type")
    network.graph.output[1].type.tensor_type.elem_type = 1
    config = mixed_config((S16, S8), (S8, S8), NoInputQDQShared=True, NumTarget=9)
    assert set(changed(quantize(network, SAMPLES, config))) == {"first", "second", "sensitive", "head"}


@pytest.mark.parametrize(("has_both", "expected"), [(False, 1), (True, 2)])
def test_two_quantizers_where_types_meet(has_both: bool, expected: int) -> None:
    """`third` computes in 16 bits, and `head` reads 8: with both quantizers, the latter reads what 16 bits left."""
    result = by_keys(TargetIndices=[4], DualQuantNodes=has_both)
    assert set(changed(result)) == {"head"}
    nodes = {each.output[0]: each for each in result.model.graph.node}
    node = next(each for each in result.model.graph.node if each.name == "head")
    count = 0
    while node.input[0] in nodes and nodes[node.input[0]].op_type.endswith("uantizeLinear"):
        node = nodes[node.input[0]]
        count += node.op_type.endswith("QuantizeLinear") and "Dequantize" not in node.op_type
    assert count == expected


# ---------------------------------------------------------------- the file of scores
def test_scores_are_kept_and_people_can_pin_layers(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scores.json"
    first = mixed(sensitivity_cache_file=path)
    content = json.loads(path.read_text())
    assert set(content) == {"version", "cache_key", "results"}
    assert [each["score"] for each in content["results"]] == sorted(each["score"] for each in content["results"])
    assert set(changed(first)) == {each["name"] for each in content["results"]} == set(LAYERS)
    content["results"][-1]["enabled"] = False
    path.write_text(json.dumps(content))

    def refuse(*args: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr("quark.features.mixed_precision.networks.MixedNetworks.alone", refuse)
    assert set(changed(mixed(sensitivity_cache_file=path))) == set(LAYERS) - {"sensitive"}
    monkeypatch.undo()
    other = mixed(target=layer(MXFP4E2M1Spec), sensitivity_cache_file=path)
    assert any("measured again" in remark for remark in other.report.remarks)
    assert json.loads(path.read_text())["cache_key"] != content["cache_key"]


def test_a_file_of_something_else_is_not_overwritten(tmp_path: Any) -> None:
    path = tmp_path / "scores.json"
    path.write_text('{"weights": 3}')
    with pytest.raises(InvalidValueError, match=r"SensitivityCacheFile .*scores.json"):
        mixed(sensitivity_cache_file=path)
    assert path.read_text() == '{"weights": 3}'


def test_power_of_two_scales_for_an_npu_can_be_mixed_with_others() -> None:
    base = QLayerConfig(input_tensors=XInt8Spec(), weight=XInt8Spec())
    result = mixed(base, HIGH, metric_threshold=0.001, metric_optimize_object="quality", include_layers=["sensitive"])
    assert set(changed(result)) == {"sensitive"}
    assert activations(result)["sensitive"] == "int16"
    scales = [tensor.choice.scale for tensor in result.report.plan if getattr(tensor.choice, "format", "") == "int8"]
    usual = [scale for each in scales if len(each) == 1 for scale in each]
    assert usual
    assert all(np.frexp(scale)[0] == 0.5 for scale in usual)
