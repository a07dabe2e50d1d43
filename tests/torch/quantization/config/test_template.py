"""Configurations for language models by name."""

import pytest
from torch import nn

from quark.decide.specs import AffineSpec, BlockSpec, DynamicSpec, FloatSpec
from quark.errors import InvalidValueError, UnsupportedOptionError
from quark.torch import LLMTemplate
from quark.torch.quantization.config.config import AWQConfig, Int8PerTensorSpec, QLayerConfig, SmoothQuantConfig
from quark.torch.quantization.config.template import SCHEMES
from quark.torch.quantization.config.type import Dtype


@pytest.fixture
def llama():
    return LLMTemplate.get("llama")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_a_configuration(scheme, llama):
    settings = llama.get_config(scheme).settings()
    assert settings.specs.weight is not None
    assert settings.exclude == ("lm_head",)
    assert not settings.features


def test_what_schemes_say(llama):
    def specs(scheme):
        found = llama.get_config(scheme).settings().specs
        return found.weight, found.activation

    weight, activation = specs("uint4_wo_128")
    assert (weight.format, weight.group_size, weight.is_symmetric, activation) == ("uint4", 128, False, None)
    weight, activation = specs("int8")
    assert isinstance(weight, AffineSpec)
    assert weight.has_one_scale
    assert activation == weight
    weight, activation = specs("w8a8")
    assert weight.is_per_channel
    assert activation == DynamicSpec("int8", is_symmetric=True, is_per_row=True)
    weight, activation = specs("mxfp4_fp8")
    assert isinstance(weight, BlockSpec)
    assert isinstance(activation, FloatSpec)
    assert activation.format == "fp8_e4m3"


def test_layers_algorithms_and_the_cache(llama):
    config = llama.get_config(
        "int4_wo_64",
        algorithm="SmoothQuant",
        kv_cache_scheme="fp8",
        min_kv_scale=0.5,
        layer_config={"*k_proj": "int8_wo"},
        layer_type_config={nn.Linear: "mxfp4"},
        exclude_layers=["*down_proj"],
        algo_configs={"smoothquant": SmoothQuantConfig(0.7)},
    )
    assert config.algo_config == [SmoothQuantConfig(0.7)]
    settings = config.settings()
    assert settings.exclude == ("*down_proj",)
    assert settings.by_name["*k_proj"].weight.format == "int8"
    assert isinstance(settings.by_type["Linear"].weight, BlockSpec)
    cache = settings.kv_cache
    assert cache.shared == ("*k_proj", "*v_proj")
    assert cache.least_scale == 0.5
    formats = {name: (each.weight.format, each.output.format) for name, each in cache.by_name.items()}
    assert formats == {"*k_proj": ("int8", "fp8_e4m3"), "*v_proj": ("int4", "fp8_e4m3")}


def test_own_schemes_and_templates():
    int8 = Int8PerTensorSpec().to_quantization_spec()
    LLMTemplate.register_scheme("my_int8", QLayerConfig(weight=int8))
    try:
        template = LLMTemplate("mine", exclude_layers_name=["head"])
        config = template.get_config("my_int8")
        assert config.global_quant_config.weight == int8
        assert config.exclude == ["head"]
        with pytest.raises(InvalidValueError, match="'my_int8' is there already"):
            LLMTemplate.register_scheme("my_int8", QLayerConfig(weight=int8))
        with pytest.raises(InvalidValueError, match="template for 'mine' does not name"):
            template.get_config("my_int8", kv_cache_scheme="int8")
    finally:
        LLMTemplate.unregister_scheme("my_int8")
    assert "my_int8" not in LLMTemplate.get_supported_schemes()
    with pytest.raises(InvalidValueError, match="'int8' is built in"):
        LLMTemplate.unregister_scheme("int8")
    with pytest.raises(InvalidValueError, match="no template for 'mine'"):
        LLMTemplate.get("mine")


def test_what_is_not_known_is_refused(llama):
    with pytest.raises(InvalidValueError, match="no scheme 'int5'"):
        llama.get_config("int5")
    with pytest.raises(InvalidValueError, match="no algorithm 'gptx'.*gptq"):
        llama.get_config("int8", algorithm=["gptx"])
    with pytest.raises(UnsupportedOptionError, match="attention_scheme 'fp8': attention itself is computed in float"):
        llama.get_config("int8", attention_scheme="fp8")


def test_keys_and_values_have_the_types_of_their_attention() -> None:
    """An entry for the attention as a whole counts for its projections too, when the cache is quantized."""
    template = LLMTemplate.get("qwen3")
    config = template.get_config("mxfp4", kv_cache_scheme="fp8", layer_config={"*mlp*": "int8", "*self_attn*": "fp8"})
    for name in ("*k_proj", "*v_proj"):
        layer = config.kv_cache_quant_config[name]
        assert layer.weight is not None
        assert layer.input_tensors is not None
        assert (layer.weight.dtype, layer.input_tensors.dtype) == (Dtype.fp8_e4m3, Dtype.fp8_e4m3)
        assert config.layer_quant_config[name] == layer
    config = template.get_config("mxfp4", kv_cache_scheme="fp8", layer_config={"*v_proj": "int8"})
    weights = {name: layer.weight for name, layer in config.kv_cache_quant_config.items()}
    assert weights["*k_proj"] is not None
    assert weights["*v_proj"] is not None
    assert (weights["*k_proj"].dtype, weights["*v_proj"].dtype) == (Dtype.fp4, Dtype.int8)


def test_a_template_lists_every_algorithm() -> None:
    template = LLMTemplate("mine too", awq_config=AWQConfig(), exclude_layers_name=["lm_head"])
    assert template.algo_config["gptq"] is None
    config = template.get_config("int4_wo_32", algorithm="awq")
    assert config.algo_config == [AWQConfig()]
    assert config.algo_config[0] is not template.algo_config["awq"]
