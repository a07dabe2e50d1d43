"""Keys and values in 8 bits, before and after rotary positions."""

from __future__ import annotations

import copy

import pytest
import torch
from small_language_models import FP8, INT8, kv_cache, llama, logits_of, quantizer, token_ids

from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError
from quark.torch import ModelQuantizer
from quark.torch.language.kv_cache import ATTRIBUTE
from quark.torch.quantization.config.config import Config, OCP_MXFP4Spec, QuantizationConfig

transformers = pytest.importorskip("transformers")


def with_cache(spec, **options):
    """A model of which only the cache is quantized."""
    config = Config(QuantizationConfig(), kv_cache_quant_config=kv_cache(spec), **options)
    return ModelQuantizer(config).quantize_model(llama(), token_ids())


@pytest.mark.parametrize("is_post_rope", [False, True])
@pytest.mark.parametrize("spec", [FP8, INT8])
def test_a_model_generates_from_a_quantized_cache(spec, is_post_rope):
    model = with_cache(spec, kv_cache_post_rope=is_post_rope)
    exact = logits_of(llama())
    assert 0 < float((logits_of(model) - exact).abs().max()) < 0.1
    prompt = token_ids()[0][:, :5]
    tokens = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens, model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=False))
    ids = token_ids()[0]
    with torch.no_grad():
        first = model(ids[:, :7], use_cache=True)
        rest = model(ids[:, 7:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, logits_of(model)[:, 7:], rtol=0, atol=1e-5)
    assert torch.equal(logits_of(copy.deepcopy(model)), logits_of(model))


def test_keys_in_the_cache_are_codes_times_the_scale():
    model = with_cache(INT8, kv_cache_post_rope=True)
    with torch.no_grad():
        cache = model(token_ids()[0], use_cache=True).past_key_values
        plain = llama()(token_ids()[0], use_cache=True).past_key_values
        both = [llama()(ids, use_cache=True).past_key_values.layers[0].keys for ids in token_ids()]
    keys, exact = cache.layers[0].keys, plain.layers[0].keys
    quantizers = getattr(model.get_submodule("model.layers.0.self_attn"), ATTRIBUTE).quantizers
    scale = quantizers["k_proj"].scale
    torch.testing.assert_close(keys, torch.round(exact / scale).clamp(-128, 127) * scale)
    highest = max(float(each.abs().max()) for each in both)
    assert float(scale) == pytest.approx(highest / 127, rel=1e-5)


def test_scales_are_shared_and_have_a_least_value():
    def scales(**options):
        layer = with_cache(FP8, **options).get_submodule("model.layers.0.self_attn")
        return [float(layer.get_submodule(name).output_quantizer.scale) for name in ("k_proj", "v_proj")]

    key, value = scales()
    assert key != value
    assert scales(kv_cache_group=["*k_proj", "*v_proj"]) == [max(key, value)] * 2
    assert scales(min_kv_scale=10.0) == [10.0, 10.0]
    assert scales(kv_cache_group=["*k_proj"]) == [key, value]


def test_an_entry_replaces_the_configuration_of_the_projection():
    """As in AMD Quark. Projections that are excluded keep the cache."""
    cache = kv_cache(INT8, QuantizationConfig(weight=INT8))
    model = quantizer("int4 groups", kv_cache_quant_config=cache).quantize_model(llama(), token_ids())
    attention = model.get_submodule("model.layers.0.self_attn")
    assert (attention.q_proj.spec.format, attention.k_proj.spec.format) == ("int4", "int8")
    excluded = quantizer("int4 groups", ["*v_proj"], kv_cache_quant_config=cache).quantize_model(llama(), token_ids())
    projection = excluded.get_submodule("model.layers.0.self_attn.v_proj")
    assert projection.spec is None
    assert projection.output_quantizer is not None


def test_impossible_caches_are_refused():
    one = QuantizationConfig(output_tensors=FP8)
    for options, words in (
        ({"kv_cache_group": ["*k_proj"]}, "without kv_cache_quant_config"),
        ({"kv_cache_quant_config": {"*k_proj": QuantizationConfig(weight=FP8)}}, "no output_tensors"),
        ({"kv_cache_quant_config": {"*k_proj": one}, "min_kv_scale": -1.0}, "min_kv_scale"),
        (
            {
                "kv_cache_quant_config": {
                    "*k_proj": QuantizationConfig(output_tensors=OCP_MXFP4Spec().to_quantization_spec())
                },
                "kv_cache_post_rope": True,
            },
            "in blocks",
        ),
    ):
        with pytest.raises(InvalidValueError, match=words):
            Config(QuantizationConfig(), **options)
    with pytest.raises(UnsupportedTypeError, match="kv_cache_quant_config"):
        Config(QuantizationConfig(), kv_cache_quant_config={"*k_proj": None})  # type: ignore[dict-item]
    graph = torch.nn.Sequential(torch.nn.Linear(4, 4))
    for cache, is_post_rope, model, data, error, words in (
        ({"*key": one}, False, llama(), None, InvalidValueError, "matches no linear layer"),
        ({"*q_proj": one}, True, llama(), token_ids(), UnsupportedOptionError, "k_proj and v_proj"),
        ({"*k_proj": one}, True, llama(), None, InvalidValueError, "there is no data"),
        ({"*k_proj": one}, False, graph, [torch.rand(2, 4)], UnsupportedOptionError, "kv_cache_quant_config"),
    ):
        config = Config(QuantizationConfig(), kv_cache_quant_config=cache, kv_cache_post_rope=is_post_rope)
        with pytest.raises(error, match=words):
            ModelQuantizer(config).quantize_model(model, data)


def test_the_configuration_survives_json():
    config = Config(
        QuantizationConfig(weight=INT8),
        kv_cache_quant_config=kv_cache(FP8),
        kv_cache_group=["*k_proj"],
        min_kv_scale=0.5,
        kv_cache_post_rope=True,
    )
    assert Config.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert Config.from_dict(config.to_dict()).settings() == config.settings()
