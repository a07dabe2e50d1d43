"""NVFP4 from a preset to files: tensor scales in the plan and in the nodes, packed weights, calibrated scales."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import quark.onnx
from quark.onnx.pack.pack import pack_model
from quark.onnx.plan_reader import read_plan
from quark.onnx.session import open_session
from quark.plan import BlockChoice, QuantizationPlan, Role

DEMO = Path(quark.__file__).parent / "demo" / "digits_mobilenet.onnx"
X = np.random.default_rng(0).random((16, 1, 8, 8), np.float32)


def quantized(target: Path, **options: object) -> QuantizationPlan:
    config = quark.onnx.get_default_config("NVFP4")
    config.extra_options.update(options)
    result = quark.onnx.quantize(str(DEMO), data={"image": X}, config=config)
    result.save(str(target))
    return result.plan


def outputs(path: Path) -> np.ndarray:
    session = open_session(path.read_bytes(), threads=1)
    return session.run(None, {session.get_inputs()[0].name: X})[0]


@pytest.mark.parametrize("scale", ["dynamic", "calibrated"])
def test_from_the_preset_to_a_packed_file(tmp_path: Path, scale: str) -> None:
    path, packed = tmp_path / "nvfp4.onnx", tmp_path / "packed.onnx"
    plan = quantized(path, TensorScale=scale)
    for tensor in plan:
        assert isinstance(tensor.choice, BlockChoice)
        assert tensor.choice.format == "nvfp4"
        is_found_at_run_time = tensor.role is Role.ACTIVATION and scale == "dynamic"
        assert (tensor.choice.quantizer.tensor_scale is None) == is_found_at_run_time
    assert QuantizationPlan.from_json(plan.to_json()) == plan
    written = {(tensor.tensor, tensor.choice) for tensor in read_plan(path)}
    assert written == {(tensor.tensor, tensor.choice) for tensor in plan}
    assert all(len(node.input) == 2 for node in onnx.load(path).graph.node if node.domain == "com.amd.quark.constant")

    facts = pack_model(path, packed)
    assert {weight.format for weight in facts.packed} == {"nvfp4"}
    whole = [weight for weight in facts.packed if weight.shape[1] % 16 == 0]
    assert whole
    assert all(each.bits <= 4.5 + 32 / np.prod(each.shape) for each in whole)
    np.testing.assert_array_equal(outputs(packed), outputs(path))
