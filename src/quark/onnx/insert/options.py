"""The options of inserting."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class NodeStyle(str, Enum):
    """How quantized computation is written."""

    QDQ = "qdq"  # QuantizeLinear and DequantizeLinear around float operators; the runtime fuses them
    QOPERATOR = "qoperator"  # QLinearConv, QLinearMatMul ...


@dataclass(frozen=True)
class NBitsOptions:
    """Weight-only MatMulNBits: groups of `group_size` along the summed axis. `accuracy_level` as ONNX Runtime has it:
    the least precision of activations inside the kernel, 1 float32 to 4 int8."""

    bits: int = 4
    group_size: int = 128
    is_symmetric: bool = True
    accuracy_level: int = 1


@dataclass(frozen=True)
class InsertOptions:
    style: NodeStyle = NodeStyle.QDQ
    has_dedicated_pairs: bool = False  # a pair of nodes for every reader, instead of one that they share
    has_pairs_on_weights: bool = False  # weights stay float behind QuantizeLinear and DequantizeLinear
    has_folded_relu: bool = False  # a Relu whose output codes begin at zero goes: saturation does its work, exactly
    has_casts: bool = False  # float16 and bfloat16 as Cast pairs instead of Extended*Linear
    matmul_nbits: NBitsOptions | None = None
