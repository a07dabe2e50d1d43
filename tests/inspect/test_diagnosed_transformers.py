"""Diagnosing transformers as torch exports them, on samples of different lengths."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
import transformers

from quark.inspect.diagnose import diagnose
from quark.onnx import quantize


class Encoder(torch.nn.Module):
    """The last hidden states of a model, for three positional inputs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask, types):
        return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state


LENGTHS = (4, 7, 5, 9, 6, 8, 3, 10)


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def bert(request, tmp_path_factory):
    """A BERT of two layers with random weights, free batch and length, masks made inside of the graph."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=200, max_position_embeddings=16, **sizes)
    config._attn_implementation = request.param
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    free = {name: {0: "batch", 1: "length"} for name in [*names, "hidden"]}
    example = tuple(torch.ones(2, 6, dtype=torch.int64) for _ in names)
    path = tmp_path_factory.mktemp("bert") / "bert.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter, and about tracing
        torch.onnx.export(
            Encoder(model),
            example,
            path,
            input_names=names,
            output_names=["hidden"],
            dynamic_axes=free,
            opset_version=17,
            dynamo=False,
        )
    return path


@pytest.fixture(scope="module")
def texts():
    random = np.random.default_rng(0)
    samples = []
    for length in LENGTHS:
        ids = random.integers(0, 200, (1, length))
        samples.append({"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)})
    return samples


def test_every_product_of_a_transformer_has_a_sensitivity(bert, texts, tmp_path):
    quantized = quantize(bert, texts, "INT8_TRANSFORMER_DEFAULT").save(tmp_path / "int8.onnx")
    diagnosis = diagnose(bert, quantized, texts)
    products = [layer for layer in diagnosis.layers if layer.weights and layer.op_type == "MatMul"]
    assert len(products) == 12  # query, key, value, output and two of the feed-forward part, in two layers
    assert all(layer.sensitivity is not None and 0 <= layer.sensitivity < math.inf for layer in products)
    assert sum(layer.share or 0 for layer in diagnosis.layers) == pytest.approx(1)
    assert {layer.rank for layer in diagnosis.layers} == set(range(1, len(diagnosis.layers) + 1))
