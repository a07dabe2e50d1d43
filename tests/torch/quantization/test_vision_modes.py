"""The calls of AMD Quark's vision example, in each mode: configure, capture, calibrate, train, freeze, export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch_networks import images, trained

from quark.common.utils.import_utils import export_for_training
from quark.torch import ModelQuantizer, export_onnx
from quark.torch.export.api import save_params
from quark.torch.quantization.config.config import QConfig, QLayerConfig, QTensorConfig, TQTSpec
from quark.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    QuantizationMode,
    RoundType,
    ScaleType,
    TQTThresholdInitMeth,
)
from quark.torch.quantization.observer.lsq_observer import LSQObserver
from quark.torch.quantization.observer.observer import (
    PerTensorMinMaxObserver,
    PerTensorPowOf2MinMaxObserver,
    PerTensorPowOf2MinMSEObserver,
)
from quark.torch.quantization.observer.tqt_observer import TQTObserver

torch.set_num_threads(1)


def _spec(dtype: Dtype, observer: Any, **more: Any) -> QTensorConfig:
    return QTensorConfig(
        dtype=dtype,
        qscheme=QSchemeType.per_tensor,
        observer_cls=observer,
        symmetric=True,
        scale_type=ScaleType.float,
        round_method=RoundType.half_even,
        is_dynamic=False,
        **more,
    )


def _tqt(start: TQTThresholdInitMeth) -> QTensorConfig:
    return _spec(Dtype.int8, TQTObserver, qat_spec=TQTSpec(threshold_init_meth=start))


def _layers(mode: str) -> QLayerConfig:
    int8, int32 = _spec(Dtype.int8, PerTensorMinMaxObserver), _spec(Dtype.int32, PerTensorMinMaxObserver)
    activation, weight, bias = {
        "plain": (int8, int8, int8),
        "a8w8": (int8, int8, int32),
        "a16w8": (_spec(Dtype.int16, PerTensorMinMaxObserver), int8, int32),
        "non_overflow": (_spec(Dtype.int8, PerTensorPowOf2MinMaxObserver),) * 3,
        "mse_powof2": (
            _spec(Dtype.uint8, PerTensorPowOf2MinMSEObserver),
            *(_spec(Dtype.int8, PerTensorPowOf2MinMSEObserver),) * 2,
        ),
        "tqt": (_tqt(TQTThresholdInitMeth._KL_J), *(_tqt(TQTThresholdInitMeth._3SD),) * 2),
        "lsq": (_spec(Dtype.int8, LSQObserver),) * 3,
    }[mode]
    return QLayerConfig(input_tensors=activation, output_tensors=activation, weight=weight, bias=bias)


SLOW = ("a8w8", "plain", "a16w8", "non_overflow", "mse_powof2", "lsq")


@pytest.mark.parametrize("mode", ["tqt", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_mode_runs_to_the_file(mode: str, tmp_path: Path) -> None:
    config = QConfig(global_quant_config=_layers(mode), quant_mode=QuantizationMode.fx_graph_mode)
    quantizer = ModelQuantizer(config)
    graph = export_for_training(trained("mobilenet").eval(), (images(8),)).module()
    quantized = quantizer.quantize_model(graph, [] if mode == "tqt" else [images(8)])
    found: list[Any] = [module for module in quantized.modules() if isinstance(module, TQTObserver)]
    thresholds = [each._log_threshold for each in found]
    assert bool(thresholds) == (mode == "tqt")
    others = [
        parameter for parameter in quantized.parameters() if all(parameter is not threshold for threshold in thresholds)
    ]
    groups = [{"params": thresholds, "lr": 1e-5, "name": "quantizer"}, {"params": others, "lr": 1e-5, "name": "weight"}]
    optimizer = torch.optim.Adam(groups, 1e-5, weight_decay=1e-4)
    quantized.train()
    loss = nn.CrossEntropyLoss()(quantized(images(8)), torch.zeros(8, dtype=torch.long))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    torch.save({"state_dict": quantized.state_dict()}, tmp_path / "model.pth")
    quantized.load_state_dict(torch.load(tmp_path / "model.pth")["state_dict"])
    frozen = quantizer.freeze(quantized.eval())
    export_onnx(model=frozen, output_dir=tmp_path, input_args=images(1))
    operators = {node.op_type for node in onnx.load(tmp_path / "quark_model.onnx").graph.node}
    assert {"QuantizeLinear", "DequantizeLinear", "Conv"} <= operators
    save_params(frozen, model_type="mobilenetv2", args=(images(8),), export_dir=tmp_path, quant_mode=config.quant_mode)
    assert len(list(tmp_path.iterdir())) > 2
