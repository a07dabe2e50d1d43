"""Encoders and decoders of Hugging Face, with random weights: batches of tokenizers, masks, caches, free lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quark.onnx.session import open_session
from quark.plan import Role
from quark.torch import ModelQuantizer, export_onnx
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype

pytest.importorskip("transformers")

INT8 = QuantizationSpec(Dtype.int8)
QUANTIZER = ModelQuantizer(Config(QuantizationConfig(INT8, INT8, INT8)))


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(vocab_size=64, max_position_embeddings=32, initializer_range=0.2, **sizes)
    ).eval()


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    return GPT2Model(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0)
    ).eval()


def tokens(length: int, *more: str, batch: int = 4) -> dict[str, torch.Tensor]:
    """What a tokenizer returns for texts of different lengths, padded to the longest."""
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, 64, (batch, length), generator=generator)
    mask = (torch.arange(length) < length - torch.arange(batch)[:, None]).long()
    return {"input_ids": ids, "attention_mask": mask, **dict.fromkeys(more, ids % 2)}


@pytest.fixture(scope="module")
def quantized_bert() -> Any:
    batches = [{**tokens(length, "token_type_ids"), "labels": torch.ones(4).long()} for length in (10, 12, 9)]
    return QUANTIZER.quantize_model(bert(), batches)


def test_all_inputs_of_a_bert_matter(quantized_bert: Any) -> None:
    from transformers.modeling_outputs import SequenceClassifierOutput

    model, batch = bert(), tokens(10, "token_type_ids")
    result = quantized_bert(**batch)
    assert isinstance(result, SequenceClassifierOutput)
    expected = model(**batch).logits
    assert (result.logits - expected).norm() < 0.15 * expected.norm()
    for name in ("attention_mask", "token_type_ids"):
        other = {**batch, name: 1 - batch[name]}
        assert not torch.equal(quantized_bert(**other).logits, result.logits), name
    assert torch.equal(
        quantized_bert(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"])[0], result[0]
    )


def test_attention_with_a_mask_is_quantized(quantized_bert: Any) -> None:
    weights = [tensor for tensor in quantized_bert.plan if tensor.role is Role.WEIGHT]
    assert len(weights) == 8  # six of the layer, pooler and classifier
    products = [reader.node for tensor in quantized_bert.plan for reader in tensor.readers if "matmul" in reader.node]
    assert sorted(products) == ["matmul_default"] * 2 + ["matmul_default_1"] * 2
    reasons = {node.reason for node in quantized_bert.plan.skipped if node.node.endswith("attention.self")}
    assert "applies a mask, whose -inf has no codes" in reasons


def test_no_name_in_the_plan_is_an_address(quantized_bert: Any) -> None:
    assert " at 0x" not in quantized_bert.plan.to_json()  # its hash has to be that of the next process


def test_a_bert_in_onnx_has_free_batch_and_length(quantized_bert: Any, tmp_path: Path) -> None:
    frozen = QUANTIZER.freeze(quantized_bert)
    report = export_onnx(frozen, tmp_path, tokens(10, "token_type_ids"))
    assert report.parity is not None
    assert report.parity.sqnr_db > 60
    session = open_session(report.path)
    shapes = {input_.name: input_.shape for input_ in session.get_inputs()}
    assert list(shapes) == ["input_ids", "attention_mask", "token_type_ids"]
    assert all(shape[0] == "batch" and str(shape[1]).startswith("sequence") for shape in shapes.values())
    batch = tokens(17, "token_type_ids", batch=2)
    (logits,) = session.run(None, {name: value.numpy() for name, value in batch.items()})
    np.testing.assert_allclose(logits, frozen(**batch).logits.numpy(), atol=2e-3)


@pytest.mark.slow
def test_a_gpt2_with_conv1d_causal_mask_and_cache(tmp_path: Path) -> None:
    from transformers import DynamicCache

    model = gpt2()
    network = QUANTIZER.quantize_model(model, [{**tokens(12), "use_cache": True}, {**tokens(7), "use_cache": True}])
    weights = {tensor.tensor for tensor in network.plan if tensor.role is Role.WEIGHT}
    assert {f"h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")} <= weights
    batch = tokens(9)
    result, expected = network(**batch), model(**batch)
    assert isinstance(result.past_key_values, DynamicCache)
    assert (result.last_hidden_state - expected.last_hidden_state).norm() < 0.1 * expected.last_hidden_state.norm()
    report = export_onnx(network, tmp_path, batch)
    assert report.parity is not None
    assert report.parity.sqnr_db > 60
    assert [input_.shape for input_ in open_session(report.path).get_inputs()] == [
        ["batch", "sequence"],
        ["batch", "sequence_1"],
    ]


@pytest.mark.parametrize("kind", ["causal", "boolean", "float", "grouped"])
def test_attention_of_every_kind_is_written_as_products(kind: str) -> None:
    from quark.torch.capture import capture
    from quark.torch.optimize import optimize

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            attention = torch.nn.functional.scaled_dot_product_attention
            return attention(q, k, k + 1, mask, is_causal=kind == "causal", enable_gqa=kind == "grouped")

    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2 if kind == "grouped" else 4, 5, 8)
    mask = torch.rand(2, 1, 5, 5) > 0.5
    mask[0, 0, 0] = False  # a row that is masked as a whole
    given = {"boolean": mask, "float": torch.where(mask, 0.0, -torch.inf)}.get(kind)
    batch = {"q": q, "k": k, **({} if given is None else {"mask": given})}
    network = capture(Attention(), lambda: batch)
    optimize(network)
    assert "scaled_dot_product_attention" not in network.code
    torch.testing.assert_close(network(**batch), Attention()(**batch))


@pytest.mark.parametrize("kind", ["chunk", "split", "sizes"])
def test_a_free_batch_can_be_cut_into_parts(kind: str, tmp_path: Path) -> None:
    class Halves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = x.shape[0] // 2
            first, second = {"chunk": lambda: x.chunk(2), "split": lambda: x.split(half)}.get(
                kind, lambda: x.split([half, x.shape[0] - half])
            )()
            return self.layer(first) + second.mean()

    network = QUANTIZER.freeze(QUANTIZER.quantize_model(Halves(), [torch.randn(4, 8)]))
    path = export_onnx(network, tmp_path, torch.randn(6, 8)).path
    x = torch.randn(10, 8)
    (result,) = open_session(path).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(result, network(x).numpy(), atol=1e-5)
