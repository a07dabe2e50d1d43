"""Language models, quantized layer by layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from quark.errors import InvalidValueError, UnsupportedOptionError
from quark.torch import ModelQuantizer
from quark.torch.language.architecture import find_architecture, is_language_model
from quark.torch.language.linear import QuantizedLinear, round_to_nearest
from quark.torch.language.pipeline import LayerWork, head_work, quantize_layer
from quark.torch.language.streams import start_streams
from quark.torch.quantization.config.config import (
    CLEConfig,
    Config,
    GPTQConfig,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QuantizationConfig,
    QuantizationSpec,
    Uint4PerGroupSpec,
)
from quark.torch.quantization.config.type import Dtype
from quark.torch.quantization.observer import PerTensorPowOf2MinMSEObserver

transformers = pytest.importorskip("transformers")

INT8 = Int8PerChannelSpec(0, symmetric=True).to_quantization_spec()
INT4 = Uint4PerGroupSpec(-1, 32).to_quantization_spec()
MXFP4 = OCP_MXFP4Spec().to_quantization_spec()
SIZES = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA_SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**others):
    config = transformers.LlamaConfig(**SIZES, **LLAMA_SIZES, num_hidden_layers=2, **others)
    return _seeded(transformers.LlamaForCausalLM, config)


def gpt2():
    return _seeded(transformers.GPT2LMHeadModel, transformers.GPT2Config(**SIZES, n_embd=64, n_layer=2, n_head=4))


def qwen():
    config = transformers.Qwen3Config(
        **SIZES, **LLAMA_SIZES, num_hidden_layers=2, head_dim=16, tie_word_embeddings=True
    )
    return _seeded(transformers.Qwen3ForCausalLM, config)


def _seeded(kind, config):
    torch.manual_seed(0)
    return kind(config).eval()


@pytest.fixture
def ids():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 96, (2, 12), generator=generator) for _ in range(3)]


def quantized(model, layer, data=None, **others):
    return ModelQuantizer(Config(layer, **{"exclude": ["lm_head"], **others})).quantize_model(model, data)


def error(model, other, ids):
    with torch.no_grad():
        expected, got = model(ids[0]).logits, other(ids[0]).logits
    return float((got - expected).square().mean() / expected.square().mean())


class TestArchitecture:
    def test_parts_are_found(self):
        architecture = find_architecture(llama())
        assert (architecture.layers, architecture.count, architecture.head) == ("model.layers", 2, "lm_head")
        assert (architecture.embedding, architecture.norm, architecture.is_tied) == (
            "model.embed_tokens",
            "model.norm",
            False,
        )
        assert find_architecture(qwen()).is_tied
        assert find_architecture(gpt2()).norm == "transformer.ln_f"

    def test_other_models_take_the_road_of_graphs(self):
        assert not is_language_model(nn.Sequential(nn.Linear(2, 2)))
        torch.manual_seed(0)
        config = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20)
        assert not is_language_model(transformers.BertModel(config))


@pytest.mark.parametrize("made", [llama, gpt2, qwen])
@pytest.mark.parametrize(
    ("layer", "most"),
    [
        (QuantizationConfig(weight=INT8), 1e-3),
        (QuantizationConfig(weight=INT8, input_tensors=Int8PerTensorSpec().to_quantization_spec()), 1e-3),
        (QuantizationConfig(weight=INT4), 0.05),
        (QuantizationConfig(weight=MXFP4, input_tensors=MXFP4), 0.15),
    ],
    ids=["int8", "w8a8", "int4 groups", "mxfp4"],
)
def test_outputs_stay_close(made, layer, most, ids):
    model = made()
    result = quantized(copy.deepcopy(model), layer, ids)
    assert 0 < error(model, result, ids) < most
    assert isinstance(result.get_output_embeddings(), nn.Linear)  # excluded


def test_weights_lie_on_their_grid(ids):
    model = quantized(llama(), QuantizationConfig(weight=INT4))
    linear = model.model.layers[1].mlp.down_proj
    assert isinstance(linear, QuantizedLinear)
    codes, found = linear.codes(), linear.parameters_of_weight()
    assert codes.shape == (64, 96)
    assert found.scale.shape == (64, 3)
    steps = (codes.reshape(64, 3, 32).astype(float) - found.zero_point[..., None]) * found.scale[..., None]
    torch.testing.assert_close(linear.weight, torch.from_numpy(steps.reshape(64, 96)).float())


def test_few_codes_have_searched_scales():
    """Symmetric int4 of AMD Quark has the scale max|w| / 7.5; ours must not be worse than that, or than max|w| / 7."""
    weight = torch.randn(32, 128, generator=torch.Generator().manual_seed(3))
    found = round_to_nearest(weight, Int4PerGroupSpec(-1, 32).to_quantization_spec().tensor_spec())
    groups = weight.reshape(32, 4, 32)
    error = (found.values.reshape(groups.shape) - groups).square().sum(-1)
    for steps in (7.0, 7.5, 8.0):
        scale = groups.abs().amax(-1, keepdim=True) / steps
        plain = (groups / scale).round().clamp(-8, 7) * scale
        assert error.sum() < (plain - groups).square().sum()
        assert (error <= (plain - groups).square().sum(-1) * 1.05).float().mean() > 0.9


def test_blocks_are_scaled_for_the_inputs_that_count(ids):
    """Where the rule of the scale is left open, and data shows what layers read."""
    exact, path = llama(), "model.layers.0.mlp.down_proj"
    with torch.no_grad():
        exact.get_submodule("model.layers.0.mlp.up_proj").weight[::7] *= 30
    layer = {"weight": OCP_MXFP4Spec(-1, False, scale_calculation_mode=None).to_quantization_spec()}
    fixed = {"weight": OCP_MXFP4Spec(-1, False, scale_calculation_mode="even").to_quantization_spec()}
    open_rule, asked, blind = (
        quantized(copy.deepcopy(exact), QuantizationConfig(**each), data)
        for each, data in ((layer, ids), (fixed, ids), (layer, None))
    )
    weights = [model.get_submodule(path).weight for model in (open_rule, asked, blind)]
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[0], weights[2])
    assert error(exact, open_rule, ids) < 0.97 * error(exact, asked, ids)


def test_tokens_have_scales_of_their_own(ids):
    per_token = Int8PerChannelSpec(1, symmetric=True, is_dynamic=True).to_quantization_spec()
    model = quantized(llama(), QuantizationConfig(input_tensors=per_token))
    quantizer = model.model.layers[0].mlp.up_proj.input_quantizer
    x = torch.tensor([[[1.0, -127.0], [0.01, 0.005]]])
    assert torch.allclose(quantizer(x), x, rtol=0.01)  # one scale for both rows would make the second one zero
    with pytest.raises(UnsupportedOptionError, match="each token"):
        quantized(nn.Sequential(nn.Linear(4, 4)), QuantizationConfig(input_tensors=per_token), [torch.rand(1, 4)])


def test_padding_is_not_calibrated_on(ids):
    """A sequence with padding gives the ranges that it has without."""
    layer = QuantizationConfig(weight=INT8, input_tensors=Int8PerTensorSpec().to_quantization_spec())
    plain = quantized(llama(), layer, [ids[0][:1]])
    padded = torch.cat([ids[0][:1], torch.zeros(1, 5, dtype=torch.long)], 1)
    mask = (torch.arange(17) < 12).long()[None]
    other = quantized(llama(), layer, [{"input_ids": padded, "attention_mask": mask, "labels": padded}])
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        scales = [value.model.layers[1].get_submodule(name).input_quantizer.scale for value in (plain, other)]
        torch.testing.assert_close(*scales, rtol=1e-4, atol=0)


def test_groups_share_an_input(ids):
    model = llama()
    config = Config(QuantizationConfig(weight=INT8)).settings()
    parts = find_architecture(model)
    streams = start_streams(model, parts, ids, has_exact=True)
    work = LayerWork(model, parts, config, parts.layer(0), model.model.layers[0], streams.calls[0], streams)
    quantize_layer(work)
    linears = [group.linears for group in work.groups]
    attention = [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)]
    assert linears == [*attention, ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)]
    assert [group.source for group in work.groups] == ["input_layernorm", "", "post_attention_layernorm", ""]
    streams.advance(work.calls, work.layer, work.exact_layer)
    with torch.no_grad():
        expected = llama()(ids[0], output_hidden_states=True).hidden_states[1]
    assert streams.exact is not None
    torch.testing.assert_close(streams.exact[0], expected)
    assert not torch.equal(streams.seen[0], expected)
    assert head_work(work, None).full_name("head") == "lm_head"


def test_no_data_for_what_needs_some():
    static = QuantizationConfig(weight=INT8, input_tensors=Int8PerTensorSpec().to_quantization_spec())
    with pytest.raises(InvalidValueError, match=r"model\.layers\.0\.self_attn\.q_proj.*no data"):
        quantized(llama(), static)
    with pytest.raises(InvalidValueError, match="expected token ids"):
        quantized(llama(), static, [torch.rand(2, 3)])


def test_algorithms_of_other_networks_are_refused(ids):
    with pytest.raises(UnsupportedOptionError, match="not for language models"):
        quantized(llama(), QuantizationConfig(weight=INT8), ids, algo_config=[CLEConfig()])


def test_an_omitted_algo_config_stands_for_no_algorithm(ids):
    """On graphs it is compensation, for these specs."""
    powers = QuantizationSpec(Dtype.int8, PerTensorPowOf2MinMSEObserver)
    config = Config(QuantizationConfig(input_tensors=powers, weight=powers), exclude=["lm_head"])
    assert config.settings().options_of("compensation") is not None
    found = ModelQuantizer(config).quantize_model(llama(), ids)
    assert found.quark.settings.options_of("compensation") is None


def test_algorithms_that_look_at_inputs_need_some():
    with pytest.raises(InvalidValueError, match="compensation, which looks at what layers read, and there is no data"):
        quantized(llama(), QuantizationConfig(weight=INT4), algo_config=[GPTQConfig()])


def test_a_spec_for_biases_is_refused():
    with pytest.raises(UnsupportedOptionError, match="biases of language models stay in float"):
        quantized(gpt2(), QuantizationConfig(weight=INT8, bias=INT8))


def test_the_head_is_quantized_if_it_is_not_excluded(ids):
    model = quantized(qwen(), QuantizationConfig(weight=INT8), ids, exclude=["*mlp*"])
    assert isinstance(model.lm_head, QuantizedLinear)
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.Linear)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)  # the embedding stays as it was
    assert model.generate(ids[0][:1], max_new_tokens=3, do_sample=False).shape == (1, 15)
