"""8-bit floats and 4-bit groups from configuration to file: what torch computes, ONNX Runtime computes."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch_networks import images, trained

from quark.errors import InvalidValueError, UnknownNameError, UnsupportedOptionError
from quark.onnx import read_plan
from quark.plan import Role
from quark.torch import ModelQuantizer
from quark.torch.export import write_onnx
from quark.torch.quantization.config.config import Config, QuantizationConfig
from quark.torch.quantization.config.named_specs import (
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    FP8E5M2PerTensorSpec,
    Int4PerGroupSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
)

torch.set_num_threads(1)


def config(activation, weight, **rest):
    specs = {"input_tensors": activation.to_quantization_spec(), "weight": weight.to_quantization_spec()}
    return Config(QuantizationConfig(**specs), algo_config=[], **rest)


PER_TENSOR = config(FP8E4M3PerTensorSpec(), FP8E4M3PerTensorSpec())
PER_CHANNEL = config(FP8E4M3PerTensorSpec(), FP8E4M3PerChannelSpec(ch_axis=0))
WIDE_RANGE = config(FP8E5M2PerTensorSpec(), FP8E5M2PerTensorSpec())
GROUPS = config(
    Int8PerTensorSpec(observer_method="min_max", symmetric=True, scale_type="float", round_method="half_even"),
    Int4PerGroupSpec(ch_axis=1, group_size=16, symmetric=True),
)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("resnet", "PER_CHANNEL"),
        ("resnet", "GROUPS"),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("resnet", "WIDE_RANGE"), ("vit", "PER_TENSOR"))),
    ],
)
def test_a_file_computes_what_the_network_does(kind: str, name: str, tmp_path: Path) -> None:
    quantizer = ModelQuantizer(globals()[name])
    network = quantizer.quantize_model(trained(kind), [images(8)])
    report = write_onnx(quantizer.freeze(network), images(2), tmp_path / "network.onnx")
    assert report.parity is not None
    assert report.parity.sqnr_db > 30
    session = onnxruntime.InferenceSession(tmp_path / "network.onnx")
    x = images(2, seed=3)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    with torch.no_grad():
        expected = quantizer.freeze(network)(x).numpy()
    assert np.linalg.norm(found - expected) < 0.03 * np.linalg.norm(expected)
    formats = {
        str(tensor.choice).partition(" ")[0]
        for tensor in read_plan(tmp_path / "network.onnx")
        if tensor.role is Role.WEIGHT
    }
    expected_formats = {"GROUPS": {"int4", "int8"}, "WIDE_RANGE": {"fp8_e5m2"}}.get(name, {"fp8_e4m3"})
    assert formats <= expected_formats
    assert next(iter(expected_formats)) in formats


@pytest.mark.parametrize("name", ["PER_CHANNEL", "GROUPS"])
def test_training_lowers_the_loss_and_scales_follow_the_weights(name: str) -> None:
    quantizer = ModelQuantizer(globals()[name])
    network = quantizer.quantize_model(trained("resnet"), [images(8)]).train()
    before = {path: buffer.clone() for path, buffer in network.named_buffers() if path.endswith(".scale")}
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-2)
    x, target, losses = images(8), torch.zeros(8, dtype=torch.long), []
    for _ in itertools.repeat(None, 6):
        loss = torch.nn.functional.cross_entropy(network(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    after = dict(network.named_buffers())
    assert any(not torch.equal(after[path], each) for path, each in before.items())


def test_first_and_last_layers_are_kept_wider() -> None:
    narrow = config(OCP_MXFP4Spec(), OCP_MXFP4Spec(), keep_first_last="mxfp8_e4m3")
    assert Config.from_dict(narrow.to_dict()).keep_first_last == "mxfp8_e4m3"
    network = ModelQuantizer(narrow).quantize_model(trained("resnet"), [images(4)])
    weights = {tensor.tensor: tensor.choice.format for tensor in network.plan if tensor.role is Role.WEIGHT}
    wide = [name for name, format in weights.items() if format == "mxfp8_e4m3"]
    assert wide == [next(iter(weights)), list(weights)[-1]]
    with pytest.raises(UnknownNameError, match="mxfp8_e4m3"):
        config(OCP_MXFP4Spec(), OCP_MXFP4Spec(), keep_first_last="fp8")
    with pytest.raises(InvalidValueError, match="in blocks"):
        ModelQuantizer(config(OCP_MXFP4Spec(), OCP_MXFP4Spec(), keep_first_last="int8")).quantize_model(
            trained("resnet"), [images(4)]
        )


def test_scales_at_run_time_are_for_language_models() -> None:
    dynamic = config(FP8E4M3PerChannelSpec(ch_axis=1, is_dynamic=True), FP8E4M3PerTensorSpec())
    with pytest.raises(UnsupportedOptionError, match="is_dynamic"):
        ModelQuantizer(dynamic).quantize_model(trained("resnet"), [images(4)])
