"""Accuracy algorithms on a small language model with outliers in its channels."""

from __future__ import annotations

import copy

import pytest
import torch

from quark.errors import InvalidValueError, UnsupportedOptionError
from quark.features.smooth_quant.options import SmoothOptions
from quark.torch import ModelQuantizer
from quark.torch.language.architecture import find_architecture
from quark.torch.language.folding import divide, scaled_groups
from quark.torch.language.linear import QuantizedLinear
from quark.torch.language.pipeline import LayerWork, _groups
from quark.torch.language.streams import start_streams
from quark.torch.quantization.config.config import (
    AutoRoundConfig,
    AutoSmoothQuantConfig,
    AWQConfig,
    Config,
    GPTAQConfig,
    GPTQConfig,
    Int4PerChannelSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    MX6Spec,
    OCP_MXFP4Spec,
    QronosConfig,
    QuantizationConfig,
    SearchedScalesConfig,
    SmoothQuantConfig,
    SVDQuantConfig,
    Uint4PerGroupSpec,
)

transformers = pytest.importorskip("transformers")

CHANNELS = QuantizationConfig(weight=Int4PerChannelSpec(0).to_quantization_spec())
GROUPS = QuantizationConfig(weight=Uint4PerGroupSpec(-1, 32).to_quantization_spec())
MXFP4 = QuantizationConfig(weight=OCP_MXFP4Spec().to_quantization_spec())
MX6 = QuantizationConfig(weight=MX6Spec().to_quantization_spec())
INT8 = QuantizationConfig(
    weight=Int8PerChannelSpec(0, symmetric=True).to_quantization_spec(),
    input_tensors=Int8PerTensorSpec().to_quantization_spec(),
)
NAMED = [
    {
        "prev_op": "input_layernorm",
        "layers": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "inp": "self_attn.q_proj",
        "module2inspect": "self_attn",
    },
    {"prev_op": "mlp.up_proj", "layers": ["mlp.down_proj"], "inp": "mlp.down_proj"},
]


@pytest.fixture(scope="module")
def model():
    """Two layers; the inputs of all linear layers have channels of different size."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=96, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in made.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.copy_(torch.randn(32).exp())
            layer.self_attn.v_proj.weight.mul_(torch.randn(16, 1).exp())
            layer.mlp.up_proj.weight.mul_(torch.randn(64, 1).exp())
    return made


@pytest.fixture(scope="module")
def data():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 96, (4, 32), generator=generator) for _ in range(4)]


def quantized(model, data, layer, algorithms):
    config = Config(layer, exclude=["lm_head"], algo_config=algorithms)
    return ModelQuantizer(config).quantize_model(copy.deepcopy(model), data)


def error(model, made, data):
    """The squared error of the logits, relative to them, on the calibration data."""
    with torch.no_grad():
        expected, found = (torch.cat([value(batch).logits for batch in data]) for value in (model, made))
    return float((found - expected).square().sum() / expected.square().sum())


@pytest.mark.parametrize(
    ("layer", "algorithm", "share"),
    [
        (CHANNELS, GPTQConfig(), 0.4),
        (CHANNELS, GPTQConfig(desc_act=False, block_size=16), 0.4),
        (GROUPS, GPTQConfig(desc_act=False, static_groups=False), 0.4),
        (MXFP4, GPTQConfig(), 0.6),
        (MX6, GPTQConfig(), 0.9),
        (GROUPS, GPTAQConfig(), 0.4),
        (GROUPS, QronosConfig(), 0.4),
        (CHANNELS, SearchedScalesConfig(), 0.9),
        (CHANNELS, AWQConfig(), 0.6),
        (CHANNELS, AWQConfig(NAMED, "model.layers"), 0.9),
        (CHANNELS, SVDQuantConfig(svd_rank=4, min_layer_size=16, alpha_candidates=[0.3, 0.6]), 0.8),
        (CHANNELS, SVDQuantConfig(svd_rank=4, min_layer_size=16, search_alpha=False, use_gptq=True), 0.3),
        (INT8, SmoothQuantConfig(), 0.6),
        (INT8, AutoSmoothQuantConfig(NAMED, compute_scale_loss="MAE"), 0.95),
    ],
)
def test_an_algorithm_is_better_than_rounding_to_nearest(model, data, layer, algorithm, share):
    plain, made = quantized(model, data, layer, []), quantized(model, data, layer, [algorithm])
    assert error(model, made, data) < share * error(model, plain, data)
    assert any(facts.changed for facts in made.quark.facts)


@pytest.mark.parametrize("layer", [CHANNELS, GROUPS, MXFP4])
def test_rounding_is_learned_and_the_same_again(model, data, layer):
    algorithm = AutoRoundConfig(iters=6, lr=1 / 6, minmax_lr=1 / 12, batch_size=2)
    plain, made = quantized(model, data, layer, []), quantized(model, data, layer, [algorithm])
    assert error(model, made, data) < error(model, plain, data)
    again = quantized(model, data, layer, [algorithm])
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))


def test_compensation_gives_codes_and_is_the_same_again(model, data):
    made, again = (quantized(model, data, GROUPS, [AWQConfig(), GPTQConfig()]) for _ in range(2))
    linear = made.model.layers[1].mlp.down_proj
    assert isinstance(linear, QuantizedLinear)
    parameters = linear.parameters_of_weight()
    codes = torch.from_numpy(linear.codes().astype("float32"))
    scale, zero_point = (
        torch.from_numpy(value.astype("float32")) for value in (parameters.scale, parameters.zero_point)
    )
    values = (codes - zero_point.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1)
    assert torch.equal(values, linear.weight)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))


def test_only_named_modules_are_compensated(model, data):
    some = quantized(model, data, CHANNELS, [GPTQConfig(inside_layer_modules=["mlp.down_proj"])])
    plain = quantized(model, data, CHANNELS, [])
    for path in ("self_attn.q_proj", "mlp.up_proj"):
        assert torch.equal(*(value.model.layers[0].get_submodule(path).weight for value in (some, plain)))
    assert not torch.equal(*(value.model.layers[0].mlp.down_proj.weight for value in (some, plain)))


def work_of(model, data):
    made = copy.deepcopy(model).requires_grad_(False)
    parts = find_architecture(made)
    streams = start_streams(made, parts, data, has_exact=False)
    settings = Config(CHANNELS, algo_config=[]).settings()
    work = LayerWork(made, parts, settings, parts.layer(0), made.model.layers[0], streams.calls[0], streams)
    work.groups = _groups(work)
    return made, work


def test_divisions_are_folded_exactly_and_heads_that_share_values_share_scales(model, data):
    made, work = work_of(model, data)
    groups, left = scaled_groups(work)
    sources = {group.source: group for group in groups}
    assert list(sources) == ["input_layernorm", "self_attn.v_proj", "post_attention_layernorm", "mlp.up_proj"]
    assert left == ()
    assert sources["self_attn.v_proj"].channels == (*range(8), *range(8), *range(8, 16), *range(8, 16))
    generator = torch.Generator().manual_seed(2)
    for group in groups:
        inputs = work.linear(group.linears[0]).weight.shape[1]
        divide(work, group, group.tied(torch.rand(inputs, generator=generator).add(0.5).double().numpy()))
    with torch.no_grad():
        expected, found = (value(data[0]).logits for value in (model, made))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(made.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


def test_a_merged_projection_takes_the_division_of_its_values(data):
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=96, bos_token_id=1, eos_token_id=2)
    made = transformers.GPT2LMHeadModel(config).eval()
    parts = find_architecture(made)
    streams = start_streams(made, parts, data, has_exact=False)
    settings = Config(CHANNELS, algo_config=[]).settings()
    work = LayerWork(made, parts, settings, parts.layer(0), made.transformer.h[0], streams.calls[0], streams)
    work.groups = _groups(work)
    groups, left = scaled_groups(work)
    channels = {group.source: group.channels for group in groups}
    assert channels == {"ln_1": None, "attn.c_attn": tuple(range(64, 96)), "ln_2": None}
    assert [each.node for each in left] == ["transformer.h.0.mlp.c_proj"]  # behind GELU


@pytest.mark.parametrize(
    ("make", "problem", "message"),
    [
        (lambda: GPTQConfig(static_groups=False), InvalidValueError, "desc_act with static_groups=False"),
        (lambda: GPTQConfig(damp_percent=0), InvalidValueError, "damp_percent 0 of algorithm 'gptq'"),
        (lambda: GPTQConfig(block_size=0), InvalidValueError, "block_size 0"),
        (lambda: AutoRoundConfig(iters=0), InvalidValueError, "iters 0"),
        (lambda: AutoSmoothQuantConfig(compute_scale_loss="MES"), InvalidValueError, "Did you mean MSE"),
        (lambda: AWQConfig(scaling_layers=[{"layers": ["a"]}]), InvalidValueError, "no prev_op"),
        (lambda: SVDQuantConfig(gptq_n_bits=8), UnsupportedOptionError, "the weight's spec says"),
    ],
)
def test_fields_are_checked(make, problem, message):
    with pytest.raises(problem, match=message):
        make()


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (GPTQConfig(inside_layer_modules=["mlp.down"]), "'mlp.down': no layer of 'model.layers'"),
        (GPTQConfig(model_decoder_layers="model.layer"), "'model.layer': LlamaForCausalLM has no such module"),
        (AWQConfig([{"prev_op": "norm", "layers": ["mlp.down_proj"]}]), "'norm', which a LlamaDecoderLayer"),
        (AWQConfig([{"prev_op": "mlp.act_fn", "layers": ["mlp.down_proj"]}]), "no weights to divide"),
        (AWQConfig([{"prev_op": "mlp.gate_proj", "layers": ["mlp.down_proj"]}]), "no layer before it"),
    ],
)
def test_names_that_do_not_fit_are_refused(model, data, algorithm, message):
    with pytest.raises(Exception, match=message):
        quantized(model, data, CHANNELS, [algorithm])


def test_graphs_refuse_what_needs_modules():
    network = torch.nn.Sequential(torch.nn.Linear(8, 8))
    for algorithm, word in (
        (GPTQConfig(inside_layer_modules=["mlp.down"]), "desc_act"),
        (SmoothQuantConfig(scale_clamp_min=0.1), "scale_clamp_min"),
    ):
        with pytest.raises(UnsupportedOptionError, match=word):
            ModelQuantizer(Config(INT8, algo_config=[algorithm])).quantize_model(network, [torch.randn(4, 8)])
    assert SmoothQuantConfig().options() == SmoothOptions(0.5)
