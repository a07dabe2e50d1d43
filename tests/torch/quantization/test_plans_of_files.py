"""A decision made for an ONNX file is trained here: its layers get the types of the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch_networks import images, trained
from torch_specs import SPECS

from quark.errors import InvalidValueError, ModelError
from quark.features.mixed_precision.plan import LayerPrecision, MixedPlan, Precision
from quark.onnx import quantize
from quark.plan import AffineChoice, QuantizationPlan, Role
from quark.torch import ModelQuantizer
from quark.torch.export import write_onnx
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.pipeline import quantize_network, read_plan
from quark.torch.specs import Settings


def formats(plan: QuantizationPlan, role: Role) -> dict[str, str]:
    return {tensor.tensor: tensor.choice.format for tensor in plan if tensor.role is role}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("float") / "float.onnx"
    from quark.torch.capture import capture

    write_onnx(capture(trained("resnet"), lambda: (images(2),)), images(2), path)
    return path


def test_a_plan_of_the_onnx_side_gives_the_types(file: Path) -> None:
    result = quantize(file, [images(4).numpy()], "A8W8")
    planned = {name for name in formats(result.plan, Role.WEIGHT) if name.endswith("weight")}
    assert planned
    common = SPECS["int16"]
    network = quantize_network(trained("resnet"), [images(4)], Settings(common), result.plan)
    weights = formats(network.plan, Role.WEIGHT)
    assert {name for name, fmt in weights.items() if fmt == "int8"} == planned
    first = next(tensor for tensor in network.plan if tensor.tensor == "x")
    assert isinstance(first.choice, AffineChoice)
    assert first.choice.format == next(tensor for tensor in result.plan if tensor.tensor == "x").choice.format


def mixed(*lowered: str) -> MixedPlan:
    network = trained("resnet")
    layers = [
        name for name, module in network.named_modules() if isinstance(module, (torch.nn.Conv2d, torch.nn.Linear))
    ]
    rows = (LayerPrecision(name, choice=Precision.LOW if name in lowered else Precision.HIGH) for name in layers)
    return MixedPlan(tuple(rows), "int16", "int16 activations, int8 weights")


def test_a_mixed_plan_gives_every_layer_its_precision() -> None:
    network = quantize_network(trained("resnet"), [images(4)], Settings(SPECS["int8"]), mixed("layer1.0.conv1", "fc"))
    weights = formats(network.plan, Role.WEIGHT)
    assert {name for name, fmt in weights.items() if fmt == "int8"} == {"layer1.0.conv1.weight", "fc.weight"}
    assert set(weights.values()) == {"int8", "int16"}


@pytest.mark.parametrize("form", ["mixed", "plan", "report"])
def test_plans_are_read_from_files(form: str, file: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    if form == "mixed":
        path.write_text(mixed("fc").to_json())
    else:
        result = quantize(file, [images(4).numpy()], "A8W8")
        path.write_text(result.plan.to_json())
        if form == "report":
            path = result.save(tmp_path / "out.onnx").with_suffix(".json")
    int8 = QuantizationSpec(Dtype.int8)
    config = Config(QuantizationConfig(input_tensors=int8, output_tensors=int8, weight=int8))
    found = ModelQuantizer(config).quantize_model(trained("resnet"), [images(4)], plan=path)
    assert "int16" in formats(found.plan, Role.WEIGHT).values() if form == "mixed" else found.plan.tensors


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', "nonsense"])
def test_what_is_no_plan_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InvalidValueError, match="other.json"):
        read_plan(path)


def test_a_plan_of_another_network_is_refused() -> None:
    plan = MixedPlan((LayerPrecision("nowhere", op_type="Conv", weights=17, choice=Precision.LOW),), "int16", "int8")
    with pytest.raises(ModelError, match="nowhere"):
        quantize_network(trained("resnet"), [images(4)], Settings(SPECS["int8"]), plan)
    assert json.loads(plan.to_json())["layers"]
