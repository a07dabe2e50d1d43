"""Put what AMD's NPU computes in the place of what the standard says, so that the quantized model predicts it.

One file, one substitution; `SUBSTITUTIONS` has them in their order. They change values a little, on purpose. They come
after calibration, as the ranges are the float network's, and before scales are chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

import onnx_ir as ir

from quark.account import Rewrite
from quark.errors import unknown_name
from quark.onnx.graph import nodes
from quark.onnx.simulate.average_pool import AveragePool
from quark.onnx.simulate.clip import Clip
from quark.onnx.simulate.hard_sigmoid import HardSigmoid
from quark.onnx.simulate.leaky_relu import LeakyRelu
from quark.onnx.simulate.options import SimulateOptions
from quark.onnx.simulate.reduce_mean import ReduceMean
from quark.onnx.simulate.sigmoid_to_hard_sigmoid import SigmoidToHardSigmoid
from quark.onnx.simulate.substitution import Substitution

__all__ = [
    "DEFAULT_SUBSTITUTIONS",
    "SUBSTITUTIONS",
    "SUBSTITUTION_OF_OPTION",
    "SimulateOptions",
    "Substitution",
    "simulate",
]

SUBSTITUTIONS: tuple[Substitution, ...] = (
    LeakyRelu(),
    SigmoidToHardSigmoid(),  # before what multiplies a HardSigmoid
    HardSigmoid(),
    AveragePool(),
    ReduceMean(),
    Clip(),
)
DEFAULT_SUBSTITUTIONS = frozenset(each.name for each in SUBSTITUTIONS if each.is_default)

# The extra options that turn one substitution on or off.
SUBSTITUTION_OF_OPTION: Mapping[str, str] = MappingProxyType(
    {
        "ConvertLeakyReluToDPUVersion": "leaky_relu",
        "ConvertSigmoidToHardSigmoid": "sigmoid_to_hard_sigmoid",
        "ConvertHardSigmoidToDPUVersion": "hard_sigmoid",
        "ConvertAvgPoolToDPUVersion": "average_pool",
        "ConvertReduceMeanToDPUVersion": "reduce_mean",
        "ConvertClipToDPUVersion": "clip",
    }
)


def simulate(model: ir.Model, options: SimulateOptions, excluded: Collection[str] = ()) -> tuple[Rewrite, ...]:
    """Substitute in place, in the main graph, all but the nodes of these names; what was found to do, in order.

    `excluded` are the nodes that stay in float: the NPU does not compute them.
    """
    known = {each.name for each in SUBSTITUTIONS}
    for name in sorted(options.substitutions - known):
        raise unknown_name("substitution", name, sorted(known))
    kept = frozenset(excluded)
    counts = {
        each.name: sum(each.apply(model, node) for node in _nodes(model, each, kept))
        for each in SUBSTITUTIONS
        if each.name in options.substitutions
    }
    return tuple(Rewrite(name, count) for name, count in counts.items() if count)


def _nodes(model: ir.Model, substitution: Substitution, excluded: frozenset[str]) -> list[ir.Node]:
    return [
        node
        for node in nodes(model)
        if node.op_type in substitution.op_types and node.domain in ("", "ai.onnx") and node.name not in excluded
    ]
