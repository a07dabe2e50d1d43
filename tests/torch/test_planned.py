"""A plan made for the ONNX file of a network is found again at its layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from frozen_networks import example_of, float_network

import quark.onnx
from quark.errors import ModelError
from quark.features.mixed_precision.plan import LayerPrecision, MixedPlan, Precision
from quark.plan import AffineChoice, QuantizationPlan, Reader, Role, TensorChoice
from quark.torch.export import write_onnx
from quark.torch.planned import PlannedLayer, layers_of_plan, weighted_layers

torch.set_num_threads(1)
ATTENTION = ["query", "key", "value", "out", "head"]


def test_a_plan_of_the_onnx_road_fits_the_network_that_the_file_came_from(tmp_path: Path) -> None:
    network = float_network("attention")
    path = write_onnx(network, example_of("attention"), tmp_path / "n.onnx", check=False).path
    samples = [{"tokens": example_of("attention").numpy()}] * 2
    config = quark.onnx.get_default_config("INT8_CNN_DEFAULT")
    config.extra_options["Protect"] = "none"  # all layers in 8 bits
    plan = quark.onnx.quantize(path, samples, config).report.plan
    layers = {layer.node: layer.layer for layer in weighted_layers(network)}
    found = layers_of_plan(network, plan)
    assert [layers[node] for node in found] == ATTENTION
    assert {layer.weight_format for layer in found.values()} == {"int8"}
    assert {layer.input_format for layer in found.values()} == {"uint8"}
    assert [layer.weight_axis for layer in found.values()] == [1, 1, 1, 1, 0]  # in the file, four are turned


def weight(name: str, node: str, format: str, scales: int = 1) -> TensorChoice:
    axis = 0 if scales > 1 else None
    return TensorChoice(
        name, Role.WEIGHT, AffineChoice(format, (0.5,) * scales, (0,) * scales, axis), (Reader(node, 1),)
    )


def test_layers_that_a_plan_does_not_quantize_stay_float() -> None:
    plan = QuantizationPlan((weight("features.2.weight", "c", "int4"),))
    layers = layers_of_plan(float_network("plain"), plan)
    assert layers == {"conv2d": PlannedLayer(), "conv2d_1": PlannedLayer(None, "int4"), "linear": PlannedLayer()}


def test_without_names_the_order_tells_and_channels_must_fit() -> None:
    network = float_network("plain")
    plan = QuantizationPlan(
        (weight("w1", "a", "int8", 16), weight("w2", "b", "int4", 16), weight("w3", "c", "int16", 10))
    )
    assert [layer.weight_format for layer in layers_of_plan(network, plan).values()] == ["int8", "int4", "int16"]
    with pytest.raises(ModelError, match="10 scales for weight 'w3', and layer 'features.2'"):
        layers_of_plan(network, replace(plan, tensors=(plan.tensors[0], plan.tensors[2], plan.tensors[1])))
    with pytest.raises(ModelError, match="'w1'.*3 layers with weights, the plan 2"):
        layers_of_plan(network, replace(plan, tensors=plan.tensors[:2]))


@pytest.mark.parametrize(
    "name", ["features.2", "/features/features.2/Conv", "node_conv2d_1", "features.2/Conv", "conv2d_1"]
)
def test_mixed_plans_are_known_by_the_names_that_exporters_give(name: str) -> None:
    plan = MixedPlan((LayerPrecision(name, "Conv", choice=Precision.LOW),), "int16", "int8")
    assert layers_of_plan(float_network("plain"), plan) == {"conv2d_1": PlannedLayer(precision=Precision.LOW)}


def test_mixed_plans_without_names_are_known_by_the_number_of_weights() -> None:
    plan = MixedPlan((LayerPrecision("Conv_0", weights=432), LayerPrecision("Gemm_9", weights=160)), "int16", "int8")
    assert set(layers_of_plan(float_network("plain"), plan)) == {"conv2d", "linear"}
    alike = MixedPlan((LayerPrecision("MatMul_3", weights=1024),), "int16", "int8")
    with pytest.raises(ModelError, match="layer 'MatMul_3' of the plan: the network has 4 layers with 1024 weights"):
        layers_of_plan(float_network("attention"), alike)


def test_two_layers_of_a_plan_for_one_of_the_network_are_an_error() -> None:
    plan = MixedPlan((LayerPrecision("features.0"), LayerPrecision("features.0/Conv")), "int16", "int8")
    with pytest.raises(ModelError, match="both 'features.0'"):
        layers_of_plan(float_network("plain"), plan)
