"""save_params and load_params: the network that is read computes what the one that was written does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from quark.errors import InvalidValueError, ModelError
from quark.torch import ModelQuantizer, load_params, save_params
from quark.torch.export import ExportError
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype, QuantizationMode

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
FX = QuantizationMode.fx_graph_mode


def network(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    int8 = QuantizationSpec(Dtype.int8)
    layer = QuantizationConfig(input_tensors=int8, output_tensors=int8, weight=int8)
    return ModelQuantizer(Config(global_quant_config=layer)).quantize_model(model, [X])


def test_a_graph_is_read_without_the_network(tmp_path: Path) -> None:
    frozen = ModelQuantizer.freeze(network())
    save_params(frozen, model_type="small", args=(X,), export_dir=tmp_path / "new", quant_mode=FX)
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["small_quantized.pth"]
    read = load_params(pth_path=tmp_path / "new" / "small_quantized.pth", quant_mode=FX)
    assert torch.equal(read(X), frozen(X))


@pytest.mark.parametrize("compressed", [False, True])
def test_a_state_goes_into_a_network_of_the_same_configuration(tmp_path: Path, compressed: bool) -> None:
    frozen = ModelQuantizer.freeze(network())
    save_params(frozen, "small", export_dir=tmp_path, compressed=compressed)
    files = tmp_path / "small.json", tmp_path / "small.safetensors"
    assert sorted(tmp_path.iterdir()) == sorted(files)
    other = network(seed=1)
    assert not torch.equal(other(X), frozen(X))
    assert torch.equal(load_params(other, *files, compressed=compressed)(X), frozen(X))


def test_mistakes_are_named(tmp_path: Path) -> None:
    frozen = ModelQuantizer.freeze(network())
    with pytest.raises(InvalidValueError, match="args is None"):
        save_params(frozen, "small", export_dir=tmp_path, quant_mode=FX)
    with pytest.raises(InvalidValueError, match="model_type '../small'"):
        save_params(frozen, "../small", export_dir=tmp_path)
    with pytest.raises(ExportError, match="expected a network from ModelQuantizer"):
        save_params(nn.Linear(2, 2), "small", export_dir=tmp_path)
    with pytest.raises(InvalidValueError, match="quant_mode 'fx_graph_mode': expected QuantizationMode"):
        save_params(frozen, "small", export_dir=tmp_path, quant_mode="fx_graph_mode")
    with pytest.raises(InvalidValueError, match="expected pth_path"):
        load_params(quant_mode=FX)
    with pytest.raises(InvalidValueError, match="expected json_path and safetensors_path"):
        load_params(frozen)
    with pytest.raises(ModelError, match="no such file"):
        load_params(pth_path=tmp_path / "none.pth", quant_mode=FX)
    (tmp_path / "other.pth").write_bytes(b"something else")
    with pytest.raises(ModelError, match="not a program that save_params wrote"):
        load_params(pth_path=tmp_path / "other.pth", quant_mode=FX)
