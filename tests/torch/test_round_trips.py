"""However a quantized network is saved, it computes the same afterwards, and goes on as before."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from quark.torch import ModelQuantizer, export_onnx, export_safetensors, load_safetensors
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.named_specs import FP8E4M3PerTensorSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.observer import LSQObserver, TQTObserver
from quark.torch.train.networks import FrozenNetwork, QuantizedNetwork

X = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
SPECS = {
    "int8": QuantizationSpec(Dtype.int8),
    "lsq": QuantizationSpec(Dtype.int8, LSQObserver),
    "tqt": QuantizationSpec(Dtype.int8, TQTObserver),
    "mxfp4": QuantizationSpec(Dtype.fp4),
    "nvfp4": QuantizationSpec(Dtype.nvfp4),
    "fp8_e4m3": FP8E4M3PerTensorSpec().to_quantization_spec(),
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8)
        self.dropout, self.linear = nn.Dropout(0.1), nn.Linear(128, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = torch.relu(self.norm(self.conv(x))).flatten(1)
        first, second = hidden.chunk(2)
        logits = self.linear(self.dropout(torch.cat([first, second])))
        return {"logits": logits if mask is None else logits * mask}


def quantizer(kind: str) -> ModelQuantizer:
    spec = SPECS[kind]
    return ModelQuantizer(Config(QuantizationConfig(input_tensors=spec, weight=spec), algo_config=[]))


def quantized(kind: str = "int8", data: list[Any] | None = None) -> Any:
    torch.manual_seed(0)
    return quantizer(kind).quantize_model(Small().eval(), [X] if data is None else data)


def through_torch(network: Any) -> Any:
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda network: pickle.loads(pickle.dumps(network)),
    "torch.save": through_torch,
}


@pytest.mark.parametrize(
    ("kind", "way"), [*((kind, "pickle") for kind in SPECS), ("int8", "deepcopy"), ("lsq", "torch.save")]
)
def test_a_network_that_trains_goes_on_as_before(kind: str, way: str) -> None:
    network = quantized(kind)
    again = WAYS[way](network)
    assert isinstance(again, QuantizedNetwork)
    assert again.plan == network.plan
    for value in (network, again):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(value.train().parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            value(X)["logits"].square().mean().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), again.parameters(), strict=True))
    frozen, frozen_again = ModelQuantizer.freeze(network), ModelQuantizer.freeze(again)
    assert frozen_again.plan == frozen.plan
    assert torch.equal(frozen(X)["logits"], frozen_again(x=X)["logits"])


@pytest.mark.parametrize("way", [pytest.param("deepcopy", marks=pytest.mark.slow), "torch.save"])
def test_a_frozen_network_exports_the_same_file(way: str, tmp_path: Path) -> None:
    frozen = ModelQuantizer.freeze(quantized())
    again = WAYS[way](frozen)
    assert isinstance(again, FrozenNetwork)
    assert torch.equal(again(X)["logits"], frozen(X)["logits"])
    paths = [export_onnx(value, tmp_path / name, X).path for name, value in (("a", frozen), ("b", again))]
    assert paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("kind", SPECS)
def test_a_state_dict_needs_no_calibration_data_of_its_own(kind: str) -> None:
    network = quantized(kind)
    other = quantized(kind, [torch.randn(4, 3, 8, 8) * 5])
    other.load_state_dict(network.state_dict())
    assert torch.equal(other(X)["logits"], network(X)["logits"])


def test_torch_export_keeps_what_a_frozen_network_computes(tmp_path: Path) -> None:
    frozen = ModelQuantizer.freeze(quantized())
    program = torch.export.export(frozen, (X,), strict=False)
    torch.export.save(program, tmp_path / "network.pt2")
    again = torch.export.load(tmp_path / "network.pt2").module()
    torch.testing.assert_close(again(X)["logits"], frozen(X)["logits"])


@pytest.mark.parametrize(
    ("kind", "bits"), [("int8", 8.0), ("mxfp4", 4.25), ("nvfp4", 4.5), ("fp8_e4m3", 8.0)], ids=lambda each: str(each)
)
def test_safetensors_are_read_into_a_network_of_the_same_kind(kind: str, bits: float, tmp_path: Path) -> None:
    frozen = ModelQuantizer.freeze(quantized(kind))
    weights, config = export_safetensors(frozen, tmp_path)
    assert (weights.name, config.name) == ("model.safetensors", "quark_network.json")
    tensors = load_file(weights)
    codes = [tensors[name] for name in ("linear.weight", "linear.weight.block_scales") if name in tensors]
    assert 8 * sum(code.nbytes for code in codes) == bits * 4 * 128
    other = quantized(kind, [torch.randn(4, 3, 8, 8) * 5])
    with torch.no_grad():
        other.linear.weight.mul_(0.3)  # other numbers, and other scales that follow from them
    loaded = load_safetensors(ModelQuantizer.freeze(other), tmp_path)
    assert torch.equal(loaded(X)["logits"], frozen(X)["logits"])
    assert loaded.plan == frozen.plan


@pytest.fixture(scope="module")
def encoder() -> tuple[Any, dict[str, torch.Tensor]]:
    """A transformer of Hugging Face with a mask and a free length, quantized; and inputs of another length."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=30, max_position_embeddings=16)).eval()

    def tokens(length: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(2 * length).reshape(2, length) % 29 + 1
        return {"input_ids": ids, "attention_mask": (ids > 2).long()}

    return quantizer("int8").quantize_model(model, [tokens(6), tokens(9)]), tokens(7)


@pytest.mark.parametrize("way", [*WAYS, "state_dict", "safetensors", "torch.export"])
def test_a_transformer_computes_the_same_afterwards(way: str, encoder: Any, tmp_path: Path) -> None:
    network, inputs = encoder
    expected = network(**inputs).last_hidden_state
    if way in WAYS:
        again = WAYS[way](network)
    elif way == "state_dict":
        again = copy.deepcopy(network)
        with torch.no_grad():
            for parameter in again.parameters():
                parameter.mul_(0.5)
        assert not torch.equal(again(**inputs).last_hidden_state, expected)
        torch.save(network.state_dict(), tmp_path / "state.pt")
        again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    elif way == "safetensors":
        frozen = ModelQuantizer.freeze(network)
        export_safetensors(frozen, tmp_path)
        again = load_safetensors(frozen, tmp_path)
    else:
        program = torch.export.export(ModelQuantizer.freeze(network), (), inputs, strict=False)
        torch.export.save(program, tmp_path / "network.pt2")
        again = torch.export.load(tmp_path / "network.pt2").module()
    with torch.no_grad():
        found = again(**inputs)
    assert type(found).__name__ == "BaseModelOutputWithPoolingAndCrossAttentions"
    torch.testing.assert_close(found.last_hidden_state, expected, rtol=0, atol=1e-6)
