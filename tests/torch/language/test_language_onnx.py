"""Language models as ONNX files, with free batch and length."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.onnx.save import SaveOptions, finish, write_model
from quark.onnx.session import open_session
from quark.plan import DynamicChoice, Role
from quark.torch import ModelQuantizer, export_onnx
from quark.torch.export.deployable import ParityError
from quark.torch.export.exporter import computed_names
from quark.torch.export.language import LanguageModel, dynamic_values, insert_language, language_graph
from quark.torch.export.parity import check_parity
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.template import LLMTemplate
from quark.torch.quantization.config.type import Dtype
from quark.torch.train.quantizers import DynamicQuantizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

SIZES = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama():
    return _seeded(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES, **LLAMA_SIZES, num_hidden_layers=1))


def gpt2():
    return _seeded(transformers.GPT2LMHeadModel, transformers.GPT2Config(**SIZES, n_embd=64, n_layer=1, n_head=4))


def qwen():
    config = transformers.Qwen3Config(
        **SIZES, **LLAMA_SIZES, num_hidden_layers=1, head_dim=16, tie_word_embeddings=True
    )
    return _seeded(transformers.Qwen3ForCausalLM, config)


def _seeded(kind, config):
    torch.manual_seed(0)
    return kind(config).eval()


def tokens(batch, length, seed=1):
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_batch_and_length_are_free(tmp_path):
    model = gpt2()
    session = open_session(export_onnx(model, tmp_path, tokens(1, 6)).path)
    assert [(input_.name, input_.shape) for input_ in session.get_inputs()] == [
        ("input_ids", ["batch", "sequence"]),
        ("attention_mask", ["batch", "sequence"]),
    ]
    assert [(output.name, output.shape) for output in session.get_outputs()] == [("logits", ["batch", "sequence", 96])]
    for batch, length in ((1, 1), (3, 11)):
        ids = tokens(batch, length, 5)
        mask = torch.ones_like(ids)
        mask[0, : length // 3] = 0
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        (logits,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        np.testing.assert_allclose(logits[mask.bool().numpy()], expected.numpy(), atol=1e-5)


def test_results_of_layers_are_quantized_too(tmp_path):
    """The head's result is the output of the file, whose name is not the one that torch gave it."""
    int8 = QuantizationSpec(Dtype.int8)
    quantizer = ModelQuantizer(Config(QuantizationConfig(int8, int8, int8)))
    model = quantizer.quantize_model(gpt2(), [tokens(2, 12)])
    session = open_session(export_onnx(model, tmp_path, tokens(2, 6)).path)
    ids = tokens(3, 9, 5)
    (logits,) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()})
    with torch.no_grad():
        expected = model(input_ids=ids).logits.numpy()
    assert len(np.unique(logits)) <= 256
    assert np.square(logits - expected).mean() < 1e-3 * np.square(expected).mean()


def test_cache(tmp_path):
    """Two steps with a cache, of which the first starts from an empty one, are the run of all tokens."""
    model = qwen()
    path = export_onnx(model, tmp_path, tokens(2, 6), has_cache=True).path
    ids, mask = tokens(2, 7, 5), torch.ones((2, 7), dtype=torch.long)
    mask[0, :2] = 0
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    session = open_session(path)
    past = {f"past_key_values.0.{name}": np.zeros((2, 2, 0, 16), np.float32) for name in ("key", "value")}
    for start, end in ((0, 4), (4, 7)):
        feeds = {"input_ids": ids[:, start:end].numpy(), "attention_mask": mask[:, :end].numpy(), **past}
        logits, *present = session.run(["logits", "present.0.key", "present.0.value"], feeds)
        past = dict(zip(past, present, strict=True))
        kept = mask[:, start:end].bool().numpy()
        np.testing.assert_allclose(logits[kept], expected[:, start:end].numpy()[kept], atol=1e-5)
    assert past["past_key_values.0.key"].shape == (2, 2, 7, 16)
    sizes = [tuple(each.dims) for each in onnx.load(path).graph.initializer if 96 in each.dims and 64 in each.dims]
    assert sizes.count((96, 64)) == 2  # the down projection, and the embedding, which the head reads too


TYPES = {"*q_proj": "w8a8_static", "*o_proj": "mxfp4", "*gate_proj": "w8a8", "*up_proj": "ptpc_fp8"}


@pytest.mark.slow
def test_every_type_in_one_file_and_a_layer_that_differs_is_named(tmp_path):
    """Layers of one model have different types; the file is compared with torch layer by layer."""
    config = LLMTemplate.get("llama").get_config("int4_wo_32", layer_config=TYPES, kv_cache_scheme="int8")
    model = LanguageModel(ModelQuantizer(config).quantize_model(llama(), [tokens(2, 12), tokens(2, 12, 2)]))
    example, path = model.example({"input_ids": tokens(2, 5)}), tmp_path / "m.onnx"
    with language_graph(model, example, None) as found:
        insert_language(found.graph, found.plan)
        values = computed_names(found.graph, found.values)
        write_model(finish(found.graph, {}, SaveOptions()), path, SaveOptions())
    nodes = onnx.load(path).graph.node
    packed = {node.name: {a.name: a.i for a in node.attribute} for node in nodes if node.op_type == "MatMulNBits"}
    down = {"K": 96, "N": 64, "bits": 4, "block_size": 32, "accuracy_level": 1}
    assert packed["model.layers.0.mlp.down_proj_nbits"] == down
    assert sorted(name.split(".")[-1].split("_")[0] for name in packed) == ["down", "gate", "k", "v"]
    counts = Counter(node.op_type for node in nodes)
    assert counts["QuantizeLinear"] == 3  # what q_proj reads, and the keys and values
    assert counts["DequantizeLinear"] == 4  # those, and the weight of q_proj
    assert counts["MXQuantizeDequantize"] == 2
    assert counts["Round"] == 1
    assert check_parity(model, path, model.batches(example), values).sqnr_db > 30
    with torch.no_grad():
        model.model.get_submodule("model.layers.0.mlp.up_proj").get_parameter("weight").mul_(1.1)
    with pytest.raises(ParityError, match=r"first layer that differs.*'model\.layers\.0\.mlp\.up_proj'"):
        check_parity(model, path, model.batches(example), values)


@pytest.mark.parametrize("is_per_row", [True, False])
@pytest.mark.parametrize(("format", "is_symmetric"), [("int8", True), ("uint8", False)])
def test_dynamic_arithmetic_is_that_of_the_quantizer(format, is_symmetric, is_per_row):
    quantizer = DynamicQuantizer("x", Role.ACTIVATION, DynamicChoice(format), is_symmetric, is_per_row)
    x = (
        torch.randn((3, 5, 64), generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-3, 1.0, 50.0])[:, None, None]
    )
    x[0, 0] = 0
    torch.testing.assert_close(dynamic_values(x, quantizer), quantizer(x), rtol=1e-6, atol=0)


def test_bad_arguments(tmp_path):
    with pytest.raises(UnsupportedTypeError, match="has_cache: only causal language models"):
        export_onnx(nn.Linear(4, 2), tmp_path, torch.rand(1, 4), has_cache=True)
    with pytest.raises(InvalidValueError, match="input_args with input_ids, inputs_embeds"):
        export_onnx(llama(), tmp_path, {"input_ids": tokens(1, 4), "inputs_embeds": torch.rand(1, 4, 64)})
    with pytest.raises(InvalidValueError, match=r"attention_mask is \(1, 3\) and input_ids \(1, 4\)"):
        export_onnx(llama(), tmp_path, (tokens(1, 4), tokens(1, 3)))
    with pytest.raises(InvalidValueError, match="language models are written with 18 to"):
        export_onnx(llama(), tmp_path, tokens(1, 4), 17)
