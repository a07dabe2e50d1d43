"""The configuration for a target, if the user names none.

    cpu    8-bit integers, which ONNX Runtime computes faster than float: INT8_CNN_DEFAULT for networks of
           convolutions, INT8_TRANSFORMER_DEFAULT for transformers
    npu    XINT8, AMD's power-of-two int8; bfloat16 for transformers, for which AMD's documents name no other type, and
           whose outliers 8 bits with one scale a tensor do not survive
    gpu    weights in float16, everything computed in float: ONNX Runtime's CUDA provider runs quantizers node by node,
           so 8-bit integers take 1.6 to 2 times as long as float there, and simulated block formats 8 times
    size   the fewest bits that usually keep the outputs, packed: 4-bit weights of products for transformers, MXFP6
           weights for other networks; activations stay in float

A network counts as a transformer if it has more matrix products than convolutions, and attention or layer
normalization.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import onnx

from quark.errors import unknown_name
from quark.onnx.load.source import read_source
from quark.onnx.load.structure import all_nodes
from quark.onnx.load.wire import carve
from quark.onnx.quantization.config.config import QuantizationConfig, get_default_config

PORTABLE = "portable"  # the profile of packed weights that every ONNX Runtime reads
_PRODUCTS = ("MatMul", "Gemm", "Attention", "MultiHeadAttention", "GroupQueryAttention")
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_NORMS = frozenset({"LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "SkipLayerNormalization"})


class Target(str, Enum):
    """The machine that a network is to run on."""

    CPU = "cpu"  # ONNX Runtime's integer kernels on this machine's processor
    NPU = "npu"  # AMD's
    GPU = "gpu"  # one that computes in 16-bit floats or microscaling formats
    SIZE = "size"  # anywhere: only the size of the file counts

    @classmethod
    def of(cls, name: str | Target) -> Target:
        """Return a target by its name; 'onnxruntime' is the earlier name of 'cpu'."""
        known = [target.value for target in cls]
        if name == "onnxruntime":
            return cls.CPU
        if name not in known:
            raise unknown_name("target", str(name), known)
        return cls(name)


@dataclass(frozen=True)
class UsualConfig:
    """A preset with options changed; `reason` says why it was chosen, `pack` is how weights are packed when saved."""

    preset: str
    reason: str
    options: Mapping[str, Any]
    pack: str | None = None

    @property
    def name(self) -> str:
        return " ".join([self.preset, *(f"{key}={str(value).lower()}" for key, value in self.options.items())])

    def config(self) -> str | QuantizationConfig:
        """The preset's name, or a config if options are changed."""
        if not self.options:
            return self.preset
        config = get_default_config(self.preset)
        config.extra_options.update(self.options)
        return config


def usual_config(target: str | Target, model: str | os.PathLike[str] | onnx.ModelProto | bytes) -> UsualConfig:
    """Choose the configuration for a target by the operators of a model."""
    wanted = Target.of(target)
    is_transformer = _is_transformer(_operators(model))
    kind = "a transformer" if is_transformer else "a network of convolutions or recurrent layers"
    reason = f"the default for {wanted.value} and {kind}"
    if wanted is Target.NPU and is_transformer:
        return UsualConfig("BF16", reason, {"BF16QDQToCast": True})
    if wanted is Target.NPU:
        return UsualConfig("XINT8", reason, {})
    if wanted is Target.GPU:
        return UsualConfig("FP16", f"the default for {wanted.value}", {"WeightsOnly": True})
    if wanted is Target.SIZE and is_transformer:
        return UsualConfig("INT4_WEIGHT_ONLY", reason, {}, PORTABLE)
    if wanted is Target.SIZE:
        return UsualConfig("MXFP6E2M3", reason, {"WeightsOnly": True}, PORTABLE)
    return UsualConfig("INT8_TRANSFORMER_DEFAULT" if is_transformer else "INT8_CNN_DEFAULT", reason, {})


def _operators(model: str | os.PathLike[str] | onnx.ModelProto | bytes) -> Counter[str]:
    """Count the operators of a model, also inside subgraphs and functions."""
    proto = model if isinstance(model, onnx.ModelProto) else carve(read_source(model)).proto
    graphs = [proto.graph.node, *(function.node for function in proto.functions)]
    return Counter(node.op_type for nodes in graphs for node in all_nodes(nodes))


def _is_transformer(operators: Counter[str]) -> bool:
    products, convolutions = (sum(operators[kind] for kind in kinds) for kinds in (_PRODUCTS, _CONVOLUTIONS))
    # decomposed norms have a mean and a root, and hardly anything else does
    has_norms = bool(_NORMS & operators.keys()) or {"ReduceMean", "Sqrt"} <= operators.keys()
    has_attention = bool(operators.keys() & {"Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention"})
    return products > convolutions and (has_norms or (has_attention and products > 2))
