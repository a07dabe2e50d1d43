"""Enums, names of operators and small functions, at the import path that existing scripts use.

The enums are in `quark.onnx.quantization.config.quant_types`; `convert_to_bf16` is in `quark.onnx.convert.floats`, and
`scale2pos` and `pos2scale` are in `quark.onnx.convert.integers`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx

from quark.errors import ModelError, UnsupportedTypeError
from quark.onnx.convert.floats import convert_to_bf16 as convert_to_bf16
from quark.onnx.convert.floats import to_float32
from quark.onnx.convert.integers import pos2scale as pos2scale
from quark.onnx.convert.integers import scale2pos as scale2pos
from quark.onnx.file_graph import read_message
from quark.onnx.load.structure import opset_versions
from quark.onnx.operators.custom_ops import (
    _COP_BFP_OP_NAME,
    _COP_DEQUANT_OP_NAME,
    _COP_DOMAIN,
    _COP_IN_OP_NAME,
    _COP_LSTM_OP_NAME,
    _COP_MX_OP_NAME,
    _COP_QUANT_OP_NAME,
    _COP_VERSION,
    get_library_path,
)
from quark.onnx.quantization.config.quant_types import *  # noqa: F403 - every name of its __all__
from quark.onnx.quantization.config.quant_types import __all__ as __all__
from quark.text import version_numbers

COP_DOMAIN, COP_VERSION = _COP_DOMAIN, _COP_VERSION
COP_QUANT_OP_NAME, COP_DEQUANT_OP_NAME = _COP_QUANT_OP_NAME, _COP_DEQUANT_OP_NAME
COP_BFP_OP_NAME, COP_MX_OP_NAME = _COP_BFP_OP_NAME, _COP_MX_OP_NAME
COP_IN_OP_NAME, COP_LSTM_OP_NAME = _COP_IN_OP_NAME, _COP_LSTM_OP_NAME
QUANT_OP_TYPES = ["QuantizeLinear", COP_QUANT_OP_NAME]
DEQUANT_OP_TYPES = ["DequantizeLinear", COP_DEQUANT_OP_NAME]
FN_OP_TYPES = [COP_BFP_OP_NAME, COP_MX_OP_NAME]


def is_version_below(package: ModuleType, target_version: str) -> bool:
    """True if the version of an imported package is lower than that one.

    >>> is_version_below(onnx, "1.0")
    False
    """
    if not isinstance(package, ModuleType):
        raise UnsupportedTypeError(f"package {package!r}: expected an imported module, such as onnx")
    return version_numbers(package.__version__) < version_numbers(target_version)


def register_custom_ops_library(session_options: Any, device: str = "CPU") -> None:
    """Register the operators of com.amd.quark in session options of ONNX Runtime."""
    session_options.register_custom_ops_library(get_library_path(device))


def get_opset_version(model: onnx.ModelProto) -> int:
    """The version of ONNX's own operators in a model."""
    versions = opset_versions(model.opset_import)
    if "" not in versions:
        raise ModelError(f"'{model.graph.name or 'model'}' does not declare its opset (opset_import)")
    return versions[""]


def convert_fp16_scale_to_fp32(
    input_model: str | Path | onnx.ModelProto,
    nodes_to_quantize: Iterable[str] = (),
    nodes_to_exclude: Iterable[str] = (),
) -> onnx.ModelProto:
    """A float16 model in float32. Excluded nodes stay in float16, between Casts, and so do all that are not in
    `nodes_to_quantize`, if there are names in it."""
    model = input_model if isinstance(input_model, onnx.ModelProto) else read_message(input_model)[0].filled()
    wanted, excluded = set(nodes_to_quantize), set(nodes_to_exclude)
    if wanted:
        excluded |= {node.name for node in model.graph.node} - wanted
    return to_float32(model, node_block_list=excluded)
