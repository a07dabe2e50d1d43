"""Models before and after cross-layer equalization, for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper
from onnx_models import Net, run_model

from quark.account import AlgorithmFacts
from quark.features.equalization.on_onnx import equalize as equalize_cross_layer
from quark.features.equalization.on_onnx import tensors_to_survey as clip_tensors
from quark.features.equalization.options import CrossLayerOptions
from quark.onnx.load import load

Array = np.ndarray[Any, Any]


class UnevenNet(Net):
    """Weights whose channels differ widely, along both of their first axes."""

    def weight(self, *shape: int, name: str | None = None) -> str:
        array = self.random.standard_normal(shape) / 2
        for axis in range(min(len(shape), 2)):
            factors = np.exp(self.random.normal(0, 1, shape[axis]))
            array = array * factors.reshape(-1, *(1,) * (len(shape) - axis - 1))
        return self.constant(array.astype(self.dtype), name)


def model_of(
    build: Callable[[Net], str], opset: int = 17, seed: int = 0, dtype: Any = np.float32, *, is_uneven: bool = False
) -> onnx.ModelProto:
    """A model of one input 'x', [2, 4, 8, 8], and one output 'y'."""
    net = (UnevenNet if is_uneven else Net)(opset, seed, dtype)
    net.input("x", (2, 4, 8, 8))
    return net.model(net.node("Neg", build(net), output="y"))


def equalized(
    model: onnx.ModelProto, options: CrossLayerOptions, extremes: Mapping[str, tuple[Array, Array]] | None = None
) -> tuple[onnx.ModelProto, AlgorithmFacts]:
    loaded = load(model).model
    facts = equalize_cross_layer(loaded, options, extremes or {})
    return ir.serde.serialize_model(loaded), facts


def extremes_of(
    model: onnx.ModelProto, options: CrossLayerOptions, feed: Mapping[str, Array]
) -> dict[str, tuple[Array, Array]]:
    """The extremes that equalization asks for, of one feed."""
    wanted = clip_tensors(load(model).model, options)
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    probe.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in wanted)
    found = run_model(probe, feed)
    lines = {
        name: np.moveaxis(found[name], axis, 0).reshape(found[name].shape[axis], -1) for name, axis in wanted.items()
    }
    return {name: (line.min(axis=1), line.max(axis=1)) for name, line in lines.items()}


def weights(model: onnx.ModelProto) -> list[Array]:
    """Those of layers with more than one dimension, in the order of the nodes."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    names = [node.input[1] for node in model.graph.node if node.op_type in ("Conv", "Gemm", "MatMul", "ConvTranspose")]
    return [arrays[name] for name in names]


def of_outputs(conv: Array) -> Array:
    return np.abs(conv).max(axis=(1, 2, 3))


def of_inputs(conv: Array) -> Array:
    return np.abs(conv).max(axis=(0, 2, 3))


def assert_same(
    before: onnx.ModelProto, after: onnx.ModelProto, feed: Mapping[str, Array], tolerance: float = 1e-4
) -> None:
    for name, array in run_model(before, feed).items():
        got = run_model(after, feed)[name]
        np.testing.assert_allclose(got, array, rtol=tolerance, atol=tolerance * np.abs(array).max())
