"""Training from an empty loader: learned steps and thresholds start from the first batch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import InvalidValueError, ModelError
from quark.ranges import KLJ, LeastErrorStep, range_of
from quark.torch import ModelQuantizer, export_for_training, export_onnx
from quark.torch.freeze import freeze
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig, TQTSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType, QuantizationMode, TQTThresholdInitMeth
from quark.torch.quantization.observer.lsq_observer import LSQObserver
from quark.torch.quantization.observer.observer import PerTensorMinMaxObserver
from quark.torch.quantization.observer.tqt_observer import TQTObserver
from quark.torch.train.quantizers import LearnedQuantizer, LsqQuantizer, TqtQuantizer

torch.manual_seed(3)
FIRST, SECOND = 3 * torch.randn(8, 3, 8, 8), torch.randn(8, 3, 8, 8)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.second(y) + y).mean((2, 3)))


def config(observer: Any, bias: bool = True, **settings: Any) -> QConfig:
    spec = QTensorConfig(
        dtype=Dtype.int8,
        qscheme=QSchemeType.per_tensor,
        observer_cls=observer,
        symmetric=True,
        is_dynamic=False,
        **settings,
    )
    layer = QLayerConfig(input_tensors=spec, output_tensors=spec, weight=spec, bias=spec if bias else None)
    return QConfig(global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode)


TQT = config(TQTObserver, qat_spec=TQTSpec(threshold_init_meth=TQTThresholdInitMeth._KL_J))
LSQ = config(LSQObserver)
BOTH = pytest.mark.parametrize("chosen", [TQT, LSQ], ids=["TQT", "LSQ"])


def quantized(chosen: QConfig, loader: Any = ()) -> Any:
    module = export_for_training(Network().eval(), (FIRST,)).module()
    return ModelQuantizer(chosen).quantize_model(module, list(loader))


def learned(network: nn.Module) -> dict[str, LearnedQuantizer]:
    return {name: module for name, module in network.named_modules() if isinstance(module, LearnedQuantizer)}


@BOTH
def test_weights_start_from_themselves_and_activations_from_the_first_batch(chosen: QConfig) -> None:
    network = quantized(chosen)
    waiting = {name for name, each in learned(network).items() if each.is_waiting}
    assert waiting
    assert not any("weight" in name or "bias" in name for name in waiting)
    network.train()
    network(FIRST)
    started = {name: each.learned.clone() for name, each in learned(network).items()}
    assert all(bool(torch.isfinite(each).all()) for each in started.values())
    network(100 * SECOND)
    assert all(torch.equal(each.learned, started[name]) for name, each in learned(network).items())


@BOTH
def test_the_input_starts_where_calibration_on_that_batch_would(chosen: QConfig) -> None:
    network = quantized(chosen)
    network.train()
    network(FIRST)
    quantizer = learned(network)["quantizers.x"]
    fmt = quantizer.format
    if isinstance(quantizer, TqtQuantizer):
        found = range_of(FIRST.numpy(), KLJ(), fmt, True)
        expected = math.ldexp(1.0, math.ceil(math.log2(max(-found.lowest, found.highest))) - 7)
    else:
        assert isinstance(quantizer, LsqQuantizer)
        expected = range_of(FIRST.numpy(), LeastErrorStep(), fmt, True).highest / fmt.qmax
    assert quantizer.step().item() == pytest.approx(expected, rel=1e-5)
    calibrated = learned(quantized(chosen, [FIRST]))["quantizers.x"]
    assert quantizer.step().item() == pytest.approx(calibrated.step().item(), rel=1e-6)


@BOTH
def test_a_trained_network_freezes_and_exports(chosen: QConfig, tmp_path: Any) -> None:
    network = quantized(chosen).train()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    before = {name: each.learned.clone() for name, each in learned(network).items()}
    for _ in range(3):
        loss = nn.functional.cross_entropy(network(FIRST), torch.arange(8) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert any(not torch.equal(each.learned, before[name]) for name, each in learned(network).items())
    frozen = freeze(network)
    export_onnx(model=frozen, output_dir=tmp_path, input_args=FIRST[:1])
    assert list(tmp_path.glob("*.onnx"))


@BOTH
def test_a_checkpoint_ends_the_waiting(chosen: QConfig) -> None:
    network = quantized(chosen).train()
    network(FIRST)
    again = quantized(chosen)
    again.load_state_dict(network.state_dict())
    assert not any(each.is_waiting for each in learned(again).values())
    network.eval()
    again.eval()
    assert torch.equal(again(SECOND), network(SECOND))
    calibrated = quantized(chosen, [FIRST])
    calibrated.load_state_dict(network.state_dict())


@BOTH
def test_what_never_saw_a_batch_cannot_be_frozen(chosen: QConfig) -> None:
    with pytest.raises(ModelError, match="starts from the first batch, and there was none"):
        freeze(quantized(chosen))
    assert "starts from the first batch" in str(copy.deepcopy(quantized(chosen)))


def test_thresholds_are_found_by_their_class() -> None:
    """Scripts give thresholds a learning rate of their own, and find them by isinstance and name."""
    modules: list[Any] = list(quantized(TQT).modules())
    found = [module._log_threshold for module in modules if isinstance(module, TQTObserver)]  # type: ignore[attr-defined]
    assert len(found) == len(learned(quantized(TQT)))
    assert all(isinstance(each, nn.Parameter) for each in found)
    assert not [module for module in quantized(LSQ).modules() if isinstance(module, TQTObserver)]


def test_scales_that_are_measured_need_data() -> None:
    with pytest.raises(InvalidValueError, match="calibration data is empty, and .* scales that are measured"):
        quantized(config(PerTensorMinMaxObserver))


def test_a_batch_that_is_not_finite_is_named() -> None:
    network = quantized(TQT).train()
    with pytest.raises(InvalidValueError, match="tensor 'x' in the first batch"):
        network(torch.full_like(FIRST, math.nan))
