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
normalization. Attention written as several nodes is a Softmax before a product, and a normalization a mean before a
root: a classifier has a Softmax too, and an audio front end has products, means and roots, all without being one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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
_ATTENTION = frozenset({"Attention", "MultiHeadAttention", "GroupQueryAttention"})
_PRODUCTS = frozenset({"MatMul", "Gemm"}) | _ATTENTION
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_TO_ROOT = frozenset({"Add", "Max", "Clip", "Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape"})
_TO_PRODUCT = frozenset(
    {
        *("Cast", "Identity", "Dropout", "Mul", "Div", "Add", "Where", "Reshape", "Transpose", "Squeeze", "Unsqueeze"),
        *("Slice", "Split", "Concat", "Expand"),
    }
)
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
    is_transformer = _is_transformer(model)
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


def _is_transformer(model: str | os.PathLike[str] | onnx.ModelProto | bytes) -> bool:
    """True for a transformer; nodes of subgraphs and functions count as those of the graph."""
    proto = model if isinstance(model, onnx.ModelProto) else carve(read_source(model)).proto
    graphs = [list(all_nodes(nodes)) for nodes in (proto.graph.node, *(function.node for function in proto.functions))]
    operators = Counter(node.op_type for nodes in graphs for node in nodes)
    products, convolutions = (sum(operators[kind] for kind in kinds) for kinds in (_PRODUCTS, _CONVOLUTIONS))
    if products <= convolutions:
        return False
    has_norms = bool(_NORMS & operators.keys()) or any(
        _leads(nodes, "ReduceMean", {"Sqrt"}, _TO_ROOT) for nodes in graphs
    )
    has_attention = bool(_ATTENTION & operators.keys()) or (
        products > 2 and any(_leads(nodes, "Softmax", _PRODUCTS, _TO_PRODUCT) for nodes in graphs)
    )
    return has_norms or has_attention


def _leads(nodes: Sequence[onnx.NodeProto], start: str, ends: Collection[str], between: Collection[str]) -> bool:
    """True if a path leads from a node of type `start` to one of `ends`, through none but the types `between`."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    ahead = [name for node in nodes if node.op_type == start for name in node.output]
    seen = set(ahead)
    while ahead:
        for node in readers.get(ahead.pop(), ()):
            if node.op_type in ends:
                return True
            if node.op_type in between:
                new = [name for name in node.output if name not in seen]
                seen.update(new)
                ahead += new
    return False
