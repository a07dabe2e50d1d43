"""Networks that compute what ONNX Runtime's integer kernels compute: bit for bit, in evaluation and in training."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch_networks import SmallMobileNet, SmallResNet

from quark.errors import ModelError
from quark.torch import ModelQuantizer, export_onnx, simulate_runtime
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType
from quark.torch.quantization.observer import LSQObserver, PerChannelMinMaxObserver, PerTensorMinMaxObserver
from quark.torch.runtime import RuntimeNetwork


def _has_exact_kernels() -> bool:
    """True for x86-64 processors with VNNI: others round sums of two differently, or saturate sums of products."""
    flags = Path("/proc/cpuinfo")
    return flags.exists() and "vnni" in flags.read_text()


exact_kernels = pytest.mark.skipif(not _has_exact_kernels(), reason="the formulas are those of processors with VNNI")


def _per_tensor(dtype: Dtype, *, symmetric: bool) -> QuantizationSpec:
    return QuantizationSpec(dtype, PerTensorMinMaxObserver, qscheme=QSchemeType.per_tensor, symmetric=symmetric)


def _config(name: str) -> Config:
    weight = _per_tensor(Dtype.int8, symmetric=True)
    if name == "learned":
        activation = QuantizationSpec(Dtype.int8, LSQObserver, qscheme=QSchemeType.per_tensor, symmetric=True)
        return Config(QuantizationConfig(activation, activation, activation))
    if name == "per channel":
        weight = QuantizationSpec(
            Dtype.int8, PerChannelMinMaxObserver, qscheme=QSchemeType.per_channel, ch_axis=0, symmetric=True
        )
    activation = _per_tensor(Dtype.uint8 if name == "unsigned" else Dtype.int8, symmetric=name == "symmetric")
    return Config(QuantizationConfig(activation, activation, weight))


def _network(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    network = kind().train()
    for _ in range(3):
        network(torch.randn(8, 3, 16, 16))
    return network.eval()


def _quantized(kind: type[nn.Module] = SmallResNet, name: str = "per channel") -> Any:
    batches = [torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(index)) for index in range(2)]
    return ModelQuantizer(_config(name)).quantize_model(_network(kind), batches)


IMAGES = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(7))


@exact_kernels
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((SmallResNet, "per channel"), (SmallMobileNet, "asymmetric"), (SmallMobileNet, "learned")),
        *(
            pytest.param(*value, marks=pytest.mark.slow)
            for value in ((SmallResNet, "symmetric"), (SmallMobileNet, "unsigned"))
        ),
    ],
)
def test_the_file_gives_the_same_bits(kind: type[nn.Module], name: str, tmp_path: Path) -> None:
    simulated = simulate_runtime(_quantized(kind, name))
    report = export_onnx(simulated, tmp_path, IMAGES[:2])
    session = onnxruntime.InferenceSession(str(report.path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: IMAGES.numpy()})
    with torch.no_grad():
        frozen = ModelQuantizer.freeze(simulated)(IMAGES).numpy()
        before = simulated(IMAGES).numpy()
    assert np.array_equal(found, frozen)
    assert np.array_equal(found, before)  # what trains is what is frozen
    assert report.parity is not None
    assert report.parity.max_abs_diff == 0


def test_the_file_has_unsigned_activations_and_integer_kernels_alone(tmp_path: Path) -> None:
    report = export_onnx(simulate_runtime(_quantized()), tmp_path, IMAGES[:2])
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(str(report.path), options, providers=["CPUExecutionProvider"])
    operators = {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert "QLinearConv" in operators
    assert not operators & {"Conv", "Add", "Gemm", "GlobalAveragePool"}


def test_every_layer_is_simulated() -> None:
    quantized = _quantized()
    layers = [name for name, module in quantized.named_modules() if type(module).__name__ == "ConvBatchNorm"]
    found = simulate_runtime(quantized).integer_layers
    assert len(layers) + 5 == len(found)  # three additions, a pool and a linear layer


def test_training_sees_the_kernels_and_reaches_the_same_parameters() -> None:
    quantized = _quantized(SmallMobileNet)
    simulated = simulate_runtime(quantized).train()
    quantized.freeze_batch_norms()
    for module in quantized.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    outputs = simulated(IMAGES)
    outputs.square().mean().backward()
    with torch.no_grad():
        assert torch.equal(outputs, simulated(IMAGES))
    gradients = [parameter.grad for parameter in quantized.parameters()]
    assert all(gradient is not None for gradient in gradients)
    assert any(bool(gradient.abs().sum() > 0) for gradient in gradients if gradient is not None)


def test_batch_norms_that_learn_are_fake_quantized() -> None:
    quantized = _quantized(SmallMobileNet)
    other = copy.deepcopy(quantized).train()
    simulated = simulate_runtime(quantized).train()
    other(IMAGES)
    simulated(IMAGES)
    first = {name: buffer for name, buffer in other.named_buffers() if name.endswith("running_mean")}
    second = dict(quantized.named_buffers())
    assert all(torch.allclose(each, second[name], atol=1e-2) for name, each in first.items())


def test_copies_and_pickles_compute_the_same() -> None:
    simulated = simulate_runtime(_quantized())
    restored = pickle.loads(pickle.dumps(simulated))
    with torch.no_grad():
        expected = simulated(IMAGES)
        assert torch.equal(expected, copy.deepcopy(simulated)(IMAGES))
        assert torch.equal(expected, restored(IMAGES))
    assert isinstance(restored, RuntimeNetwork)


def test_what_was_not_quantized_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"expected what ModelQuantizer\.quantize_model or freeze gave, got Linear"):
        simulate_runtime(nn.Linear(2, 2))
