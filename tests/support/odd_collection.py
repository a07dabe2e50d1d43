"""All odd models by name, and what is fed to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import onnx
import onnxruntime
from odd_convolutions import CONVOLUTIONS
from odd_graphs import GRAPHS, extra_feed
from odd_models import ODD_MODELS, odd_feed
from odd_numbers import NUMBERS
from odd_operators import OPERATOR_NETWORKS, newest
from odd_sequences import SEQUENCES
from onnx_models import Array

_FAMILIES = (ODD_MODELS, CONVOLUTIONS, SEQUENCES, GRAPHS, NUMBERS, OPERATOR_NETWORKS)
_NEEDS_OPSET = {"attention_operator": 23, "rms_norm_operator": 23, "opset 23": 23}
RUNTIME = tuple(map(int, onnxruntime.__version__.split(".")[:2]))
# To ONNX Runtime 1.22, a product times a constant of one element and one axis loses that axis.
_NEEDS_RUNTIME = {"one_number": (1, 23)}
# Those that the installed onnx and ONNX Runtime know.
EVERY_ODD_MODEL: Mapping[str, Callable[[], onnx.ModelProto]] = {
    name: make
    for family in _FAMILIES
    for name, make in family.items()
    if _NEEDS_OPSET.get(name, 0) <= newest() and _NEEDS_RUNTIME.get(name, RUNTIME) <= RUNTIME
}


@cache
def made(name: str) -> onnx.ModelProto:
    """The model with the shapes that onnx infers; the same object every time, which nobody may change."""
    return onnx.shape_inference.infer_shapes(EVERY_ODD_MODEL[name]())


def feeds_of(name: str, count: int = 6) -> list[dict[str, Array]]:
    """Samples for that model: indices lie within their tables, masks keep the first element."""
    feeds = [extra_feed(name, odd_feed(made(name), seed), seed) for seed in range(count)]
    for feed in feeds:
        if "keep" in feed:
            feed["keep"] = np.asarray(feed["keep"]).copy()
            feed["keep"][..., 0] = True
    return feeds


def calibration_of(name: str) -> list[dict[str, Array]]:
    """The same samples, the last of them twice: that one is held out, and all of them are calibrated on."""
    feeds = feeds_of(name)
    return [*feeds, feeds[-1]]
