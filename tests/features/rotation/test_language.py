"""Rotation of language models: the float model computes the same, and quantizers come behind rotations."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from quark.errors import InvalidValueError, ModelError, UnsupportedOptionError
from quark.features.rotation.on_language import OnlineRotation, before_layers
from quark.features.rotation.options import LanguageRotationOptions
from quark.torch import ModelQuantizer
from quark.torch.language.architecture import find_architecture
from quark.torch.language.linear import QuantizedLinear
from quark.torch.language.pipeline import ModelWork
from quark.torch.quantization.config.algorithm import AlgoConfig, OnlineRotationConfig, RotationConfig
from quark.torch.quantization.config.config import Config, OCP_MXFP4Spec, QuantizationConfig

transformers = pytest.importorskip("transformers")

MXFP4 = OCP_MXFP4Spec().to_quantization_spec()
SIZES = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA_SIZES = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2}


def made(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:  # gains and shifts that matter
                parameter.add_(torch.linspace(-0.3, 0.5, parameter.numel()))
    return model


def llama(**others):
    config = transformers.LlamaConfig(**SIZES, **LLAMA_SIZES, num_hidden_layers=2, **others)
    return made(transformers.LlamaForCausalLM, config)


def gpt2():
    return made(transformers.GPT2LMHeadModel, transformers.GPT2Config(**SIZES, n_embd=96, n_layer=2, n_head=6))


def qwen():
    config = transformers.Qwen3Config(
        **SIZES, **LLAMA_SIZES, num_hidden_layers=2, head_dim=16, tie_word_embeddings=True
    )
    return made(transformers.Qwen3ForCausalLM, config)


def gemma():
    config = transformers.GemmaConfig(**SIZES, **LLAMA_SIZES, num_hidden_layers=2, head_dim=16)
    return made(transformers.GemmaForCausalLM, config)


IDS = torch.arange(24).reshape(2, 12) + 3


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("build", [llama, gpt2, qwen, gemma])
def test_folded_rotations_change_weights_and_not_the_model(build):
    model = build()
    rotated = copy.deepcopy(model)
    r3 = build is not gpt2  # which has no rotary embedding
    work = ModelWork(rotated, find_architecture(rotated), None)
    (facts,) = before_layers(work, LanguageRotationOptions(r2=True, r3=r3))
    assert (logits(rotated) - logits(model)).abs().max() < 1e-4 * logits(model).abs().max()
    assert len(facts.changed) == (22 if r3 else 15)
    assert rotated.lm_head.weight is not rotated.get_input_embeddings().weight
    assert not work.architecture.is_tied
    first, other = (value.get_input_embeddings().weight.detach() for value in (model, rotated))
    np.testing.assert_allclose(first.norm(dim=1), other.norm(dim=1), rtol=1e-5)
    assert (first - other).abs().max() > 0.01


def quantized(model, rotation):
    layer = QuantizationConfig(weight=MXFP4, input_tensors=MXFP4)
    config = Config(layer, exclude=["lm_head"], algo_config=[rotation])
    return ModelQuantizer(config).quantize_model(model, [IDS])


def test_inputs_are_rotated_before_they_are_quantized():
    model = llama()
    config = RotationConfig(r2=True, r4=True, online_r1_rotation=True, rotation_size=32)
    result = quantized(copy.deepcopy(model), config)
    sizes = {"self_attn.q_proj": 32, "mlp.up_proj": 32, "mlp.down_proj": 32, "self_attn.o_proj": 0}
    for layer in result.model.layers:
        for path, size in sizes.items():
            linear = layer.get_submodule(path)
            assert isinstance(linear, QuantizedLinear)
            assert getattr(linear.rotation, "size", 0) == size
    facts = [name for fact in result.quark.facts for name in fact.changed]
    assert "model.layers.0.mlp.down_proj: its input" in facts
    exact = copy.deepcopy(result)
    plain = dict(model.named_modules())
    for path, linear in exact.named_modules():
        if isinstance(linear, QuantizedLinear):
            linear.input_quantizer = None
            if path.endswith("mlp.down_proj"):
                expected = plain[path].weight.detach()
                assert linear.rotation is not None
                undone = linear.rotation(linear.weight)  # H is symmetric, so that H H is the identity
                assert (undone - expected).norm() < 0.2 * expected.norm()
    assert (logits(exact) - logits(model)).norm() < 0.3 * logits(model).norm()


def test_an_online_rotation_is_orthogonal_and_works_in_blocks():
    x = torch.randn(2, 3, 320, generator=torch.Generator().manual_seed(0))
    for size in (32, 320, 160):
        module = OnlineRotation(size)
        blocks = x.double().unflatten(-1, (-1, size)).numpy() @ module.product()
        np.testing.assert_allclose(module(x), blocks.reshape(x.shape), atol=1e-5)


def test_layers_can_be_named_as_amd_names_them():
    attention = [f"model.layers.layer_id.self_attn.{name}_proj" for name in "qkv"]
    feed_forward = {
        "prev_modules": ["model.layers.layer_id.self_attn.o_proj"],
        "norm_module": "model.layers.layer_id.post_attention_layernorm",
        "next_modules": ["model.layers.layer_id.mlp.up_proj", "model.layers.layer_id.mlp.gate_proj"],
    }
    norm = {"norm_module": "model.layers.layer_id.input_layernorm", "next_modules": attention}
    layers = {
        "first_layer": [{"prev_modules": ["model.embed_tokens"], **norm}, feed_forward],
        "middle_layers": [{"prev_modules": ["model.layers.pre_layer_id.mlp.down_proj"], **norm}, feed_forward],
        "last_layer": [
            {
                "prev_modules": ["model.layers.layer_id.mlp.down_proj"],
                "norm_module": "model.norm",
                "next_modules": ["lm_head"],
            }
        ],
    }
    config = RotationConfig(scaling_layers=layers)
    found, named = llama(), llama()
    quantized(found, RotationConfig())
    quantized(named, config)
    for name, value in found.state_dict().items():
        torch.testing.assert_close(named.state_dict()[name], value, rtol=0, atol=0)
    assert AlgoConfig.from_dict(config.to_dict()) == config
    layers["last_layer"][0]["next_modules"] = ["model.lm_head"]
    with pytest.raises(InvalidValueError, match=r"no module 'model\.lm_head'"):
        quantized(llama(), RotationConfig(scaling_layers=layers))
    layers["last_layer"] = []
    with pytest.raises(ModelError, match="differs"):
        quantized(llama(), RotationConfig(scaling_layers=layers))


def test_settings_that_cannot_be_met_are_errors():
    with pytest.raises(UnsupportedOptionError, match="trainable"):
        RotationConfig(trainable=True)
    with pytest.raises(UnsupportedOptionError, match="use_input_prescale"):
        RotationConfig(r4=True, online_config=OnlineRotationConfig(False, use_input_prescale=True))
    with pytest.raises(InvalidValueError, match="online_r1_rotation"):
        RotationConfig(r1=False, r2=True, online_r1_rotation=True)
    with pytest.raises(InvalidValueError, match="rotation_size = 7 does not divide the 96 channels"):
        quantized(llama(), RotationConfig(rotation_size=7))
    with pytest.raises(ModelError, match="R3: no attention module of GPT2LMHeadModel"):
        quantized(gpt2(), RotationConfig(r1=False, r3=True))
    with pytest.raises(InvalidValueError, match="mlp 'experts'"):
        quantized(llama(), RotationConfig(r4=True, mlp="experts"))
    with pytest.raises(InvalidValueError, match="v_proj 'attn.v'"):
        quantized(llama(), RotationConfig(r2=True, v_proj="attn.v"))
