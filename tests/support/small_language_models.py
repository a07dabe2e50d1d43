"""Small language models with random weights, token ids to calibrate them, and configurations by name."""

from __future__ import annotations

from typing import Any

import torch

from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import (
    Config,
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    FP8E5M2PerChannelSpec,
    Int3PerGroupSpec,
    Int4PerChannelSpec,
    Int4PerGroupSpec,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    OCP_MXFP6E3M2Spec,
    OCP_MXFP8E4M3Spec,
    QuantizationConfig,
    Uint4PerGroupSpec,
    Uint8PerTensorSpec,
)

VOCABULARY = 64
FP8 = FP8E4M3PerTensorSpec().to_quantization_spec()
INT8 = Int8PerTensorSpec(symmetric=True).to_quantization_spec()
_ROWS = Int8PerChannelSpec(0, symmetric=True).to_quantization_spec()
_TOKENS = Int8PerChannelSpec(1, symmetric=True, is_dynamic=True).to_quantization_spec()

LAYERS = {
    "uint4 groups": QuantizationConfig(weight=Uint4PerGroupSpec(-1, 32, symmetric=False).to_quantization_spec()),
    "int4 groups": QuantizationConfig(weight=Int4PerGroupSpec(-1, 32).to_quantization_spec()),
    "int4 channels": QuantizationConfig(weight=Int4PerChannelSpec(0).to_quantization_spec()),
    "int3 groups": QuantizationConfig(weight=Int3PerGroupSpec(-1, 32).to_quantization_spec()),
    "int8 channels": QuantizationConfig(weight=_ROWS),
    "int8 static": QuantizationConfig(weight=INT8, input_tensors=INT8),
    "int8 asymmetric": QuantizationConfig(
        weight=_ROWS, input_tensors=Uint8PerTensorSpec(symmetric=False).to_quantization_spec()
    ),
    "int8 tokens": QuantizationConfig(weight=_ROWS, input_tensors=_TOKENS),
    "fp8": QuantizationConfig(weight=FP8, input_tensors=FP8),
    "fp8 tokens": QuantizationConfig(
        weight=FP8E4M3PerChannelSpec(0).to_quantization_spec(),
        input_tensors=FP8E4M3PerChannelSpec(1, is_dynamic=True).to_quantization_spec(),
    ),
    "fp8 e5m2": QuantizationConfig(weight=FP8E5M2PerChannelSpec(0).to_quantization_spec()),
    "mxfp4": QuantizationConfig(
        weight=OCP_MXFP4Spec().to_quantization_spec(), input_tensors=OCP_MXFP4Spec().to_quantization_spec()
    ),
    "mxfp6": QuantizationConfig(weight=OCP_MXFP6E3M2Spec().to_quantization_spec()),
    "mxfp8": QuantizationConfig(weight=OCP_MXFP8E4M3Spec().to_quantization_spec()),
}


def llama(*, layers: int = 2, is_tied: bool = False, has_bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    """A Llama, with the same numbers each time."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=is_tied,
        attention_bias=has_bias,
        dtype=dtype,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def token_ids(count: int = 2) -> list[torch.Tensor]:
    """Batches of random tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (2, 12), generator=generator) for _ in range(count)]


def quantizer(name: str, exclude: list[str] | None = None, **options: Any) -> ModelQuantizer:
    """A quantizer with one of the configurations of LAYERS."""
    exclude = ["lm_head"] if exclude is None else exclude
    return ModelQuantizer(Config(LAYERS[name], exclude=exclude, algo_config=[], **options))


def kv_cache(spec: Any, layer: QuantizationConfig | None = None) -> dict[str, QuantizationConfig]:
    """The configuration of a cache whose projections are quantized as `layer`."""
    own = layer or QuantizationConfig()
    made = QuantizationConfig(own.input_tensors, spec, own.weight)
    return {"*k_proj": made, "*v_proj": made}


def logits_of(model: Any) -> torch.Tensor:
    """What the model returns for the first batch."""
    with torch.no_grad():
        found: torch.Tensor = model(token_ids()[0]).logits
    return found
