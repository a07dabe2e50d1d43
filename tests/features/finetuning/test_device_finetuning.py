"""Finetuning whose activations stay on the device that trains gives what it gives elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark.features.finetuning import device_walk, on_onnx
from quark.onnx import get_default_config, quantize
from quark.onnx.session import open_session


def network() -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    shapes = {"a": (16, 3, 3, 3), "b": (16, 1, 3, 3), "c": (24, 16, 1, 1), "d": (24, 10)}
    constants = [
        numpy_helper.from_array(generator.standard_normal(shape).astype(np.float32) / 3, name)
        for name, shape in shapes.items()
    ]
    nodes = [
        helper.make_node("Conv", ["x", "a"], ["xa"], "first", pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["xa"], ["ra"]),
        helper.make_node("Conv", ["ra", "b"], ["rb"], "depthwise", pads=[1, 1, 1, 1], group=16),
        helper.make_node("Add", ["ra", "rb"], ["sum"]),
        helper.make_node("Conv", ["sum", "c"], ["rc"], "pointwise"),
        helper.make_node("Relu", ["rc"], ["rr"]),
        helper.make_node("GlobalAveragePool", ["rr"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("Gemm", ["f", "d"], ["y"], "last"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 20, 20])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(nodes, "network", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def samples(count: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(1)
    return [{"x": generator.standard_normal((1, 3, 20, 20)).astype(np.float32)} for _ in range(count)]


def finetuned(folder: Any, device: str = "cpu", algorithm: str = "adaround", **settings: Any) -> Any:
    config = get_default_config("A8W8_ADAROUND")
    config.extra_options["InferDevice"] = device
    config.extra_options["FastFinetune"] |= {
        "DataSize": 24,
        "NumIterations": 100,
        "OptimDevice": device,
        "CacheDir": str(folder),
        "OptimAlgorithm": algorithm,
        **settings,
    }
    return quantize(network(), samples(24), config)


def error_of(model: Any) -> float:
    fresh = samples(40)[24:]
    one, other = (
        [session.run(None, sample)[0] for sample in fresh] for session in map(open_session, (network(), model))
    )
    return float(np.square(np.array(one) - np.array(other)).sum() / np.square(np.array(one)).sum())


def layers_of(result: Any) -> list[str]:
    facts = next(algorithm for algorithm in result.report.algorithms if algorithm.name.startswith("Ada"))
    return sorted([each.partition(":")[0] for each in facts.changed] + [each.node for each in facts.left])


@pytest.mark.parametrize("settings", [{}, {"DropRatio": 0.5}, {"Reconstruction": "block"}], ids=str)
def test_joined_samples_give_the_same_finetuning(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """The processor plays the device."""
    plain = finetuned(tmp_path / "plain", **settings)
    made = []

    class Seen(device_walk.DeviceWalk):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(on_onnx, "shares_memory", lambda options: True)
    monkeypatch.setattr(device_walk, "DeviceWalk", Seen)
    monkeypatch.setattr(device_walk, "TOGETHER", 7)
    joined = finetuned(tmp_path / "joined", **settings)
    assert len(made) == 2
    assert layers_of(joined) == layers_of(plain)
    assert error_of(joined.model) == pytest.approx(error_of(plain.model), rel=0.2)


@pytest.mark.cuda
@pytest.mark.parametrize("algorithm", ["adaround", "adaquant"])
def test_finetuning_on_a_gpu_is_as_good_as_on_the_processor(tmp_path: Any, algorithm: str) -> None:
    on_cpu = finetuned(tmp_path / "cpu", algorithm=algorithm)
    on_gpu = finetuned(tmp_path / "gpu", "cuda:0", algorithm)
    assert on_gpu.report.device == "cuda:0"
    assert layers_of(on_gpu) == layers_of(on_cpu)
    assert error_of(on_gpu.model) == pytest.approx(error_of(on_cpu.model), rel=0.3)
