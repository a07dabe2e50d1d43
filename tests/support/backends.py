"""A block quantizer in each of its forms, all as functions of (x, quantizer, axis) on numpy arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from quark.formats.arrays import array_kind
from quark.formats.block import BlockQuantizer, quantize_dequantize_blocks
from quark.formats.native import quantize_dequantize_native
from quark.ops.library import get_library_path
from quark.ops.onnx_nodes import make_block_node, stored_tensor_scale
from quark.ops.portable_functions import add_portable_functions

Array = np.ndarray[Any, Any]
Backend = Callable[[Array, BlockQuantizer, int], Array]

ONNX_TYPE = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16}


def block_model(quantizer: BlockQuantizer, axis: int, rank: int, dtype: int, opset: int = 17) -> onnx.ModelProto:
    """A model of the one operator, for tensors of any shape of that rank."""
    scale = stored_tensor_scale(quantizer)
    name = "" if scale is None else "tensor_scale"
    node = make_block_node(quantizer, axis, "x", "y", "the_node", tensor_scale=name)
    constant = [] if scale is None else [helper.make_node("Constant", [], [name], value_float=scale)]
    return node_model([*constant, node], rank, dtype, opset)


def node_model(nodes: list[onnx.NodeProto], rank: int, dtype: int, opset: int = 17) -> onnx.ModelProto:
    """A model from x to y."""
    x = helper.make_tensor_value_info("x", dtype, [f"d{i}" for i in range(rank)])
    y = helper.make_tensor_value_info("y", dtype, None)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.amd.quark", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=imports, ir_version=8)


def open_session(model: onnx.ModelProto, native: bool, threads: int = 1) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if native:
        options.register_custom_ops_library(get_library_path())
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@functools.lru_cache(maxsize=256)
def _session(quantizer: BlockQuantizer, axis: int, rank: int, dtype: int, native: bool) -> Any:
    model = block_model(quantizer, axis, rank, dtype)
    return open_session(model if native else add_portable_functions(model), native)


def _run_session(x: Array, quantizer: BlockQuantizer, axis: int, native: bool) -> Array:
    session = _session(quantizer, axis, x.ndim, ONNX_TYPE[x.dtype], native)
    return session.run(None, {"x": np.ascontiguousarray(x).reshape(x.shape)})[0]


def by_numpy(x: Array, quantizer: BlockQuantizer, axis: int) -> Array:
    return quantize_dequantize_blocks(array_kind(x), x, axis % max(x.ndim, 1), quantizer)


def by_torch(x: Array, quantizer: BlockQuantizer, axis: int) -> Array:
    import torch

    tensor = torch.from_numpy(np.array(x))
    return quantize_dequantize_blocks(array_kind(tensor), tensor, axis % max(x.ndim, 1), quantizer).numpy()


def by_native_entry(x: Array, quantizer: BlockQuantizer, axis: int) -> Array:
    """The compiled code as numpy calls it."""
    result = quantize_dequantize_native(x, axis % max(x.ndim, 1), quantizer)
    assert result is not None, "the compiled library is not in use"
    return result


def by_native_operator(x: Array, quantizer: BlockQuantizer, axis: int) -> Array:
    """The compiled code as ONNX Runtime calls it."""
    return _run_session(x, quantizer, axis, native=True)


def by_portable_function(x: Array, quantizer: BlockQuantizer, axis: int) -> Array:
    """Ordinary ONNX operators on ONNX Runtime with nothing registered."""
    return _run_session(x, quantizer, axis, native=False)


BACKENDS: dict[str, Backend] = {
    "numpy": by_numpy,
    "torch": by_torch,
    "native_entry": by_native_entry,
    "native": by_native_operator,
    "portable": by_portable_function,
}
