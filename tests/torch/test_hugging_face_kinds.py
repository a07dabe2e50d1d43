"""Models of Hugging Face that are no causal language models are quantized on their graph, whatever they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quark.torch import ModelQuantizer, export_onnx
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype
from quark.torch.train.networks import QuantizedNetwork

transformers: Any = pytest.importorskip("transformers")
SMALL = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 30}


def convnext() -> tuple[Any, dict[str, Any]]:
    """Without embeddings: asking for them raises an error."""
    config = transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=3)
    return transformers.ConvNextForImageClassification(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def t5() -> tuple[Any, dict[str, Any]]:
    """An encoder beside a decoder."""
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**SMALL, decoder_start_token_id=0))
    tokens = torch.arange(1, 11).reshape(2, 5)
    return model, {"input_ids": tokens, "decoder_input_ids": tokens[:, :3], "use_cache": False}


def masked_bert() -> tuple[Any, dict[str, Any]]:
    """With an embedding, a list of layers and a head, but not causal."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=30, max_position_embeddings=16))
    tokens = torch.arange(1, 11).reshape(2, 5)
    return model, {"input_ids": tokens, "attention_mask": tokens > 2, "token_type_ids": tokens % 2}


@pytest.mark.parametrize("make", [convnext, t5, masked_bert])
def test_it_is_quantized_and_exported_as_a_graph(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = make()
    int8 = QuantizationSpec(Dtype.int8)
    network = ModelQuantizer(Config(QuantizationConfig(int8, int8, int8))).quantize_model(model.eval(), [batch, batch])
    assert isinstance(network, QuantizedNetwork)
    with torch.no_grad():
        expected, found = model(**batch).logits, network(**batch)
    assert type(found) is type(model(**batch))
    assert (found.logits - expected).norm() < 0.1 * expected.norm()
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert export_onnx(network, tmp_path, tensors).parity is not None
