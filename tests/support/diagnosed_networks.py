"""The demo network and quantized forms of it, for tests of what is found in them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import onnx
from onnx import numpy_helper

from quark.demo import network_path
from quark.onnx import get_default_config, quantize


@lru_cache(maxsize=1)
def images() -> np.ndarray:
    return np.random.default_rng(0).random((12, 1, 8, 8), dtype=np.float32)


@lru_cache(maxsize=8)
def quantized(preset: str, **changes) -> bytes:
    """The demo network, quantized; a change is a field of the config."""
    config = get_default_config(preset)
    for name, value in changes.items():
        setattr(config, name, value)
    return quantize(network_path(), images(), config).model.SerializeToString()


def quantized_model(preset: str, **changes) -> onnx.ModelProto:
    return onnx.load_model_from_string(quantized(preset, **changes))


def with_larger_weight(model: onnx.ModelProto, node: str, factor: float) -> onnx.ModelProto:
    """The weight of one layer is off by a factor for every other channel, by its scales."""
    damaged = onnx.ModelProto()
    damaged.CopyFrom(model)
    layer = next(each for each in damaged.graph.node if each.name == node)
    maker = next(each for each in damaged.graph.node if layer.input[1] in each.output)
    scale = next(each for each in damaged.graph.initializer if each.name == maker.input[1])
    numbers = numpy_helper.to_array(scale).copy()
    numbers = np.where(np.arange(numbers.size).reshape(numbers.shape) % 2, numbers * np.float32(factor), numbers)
    scale.CopyFrom(numpy_helper.from_array(numbers.astype(np.float32), scale.name))
    return damaged
