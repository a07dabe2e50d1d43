"""SmoothQuant of an ONNX model.

A Mul that divides a tensor has to stay in float and to read its input in float, because a quantizer before it would
already lose the small channels that the Mul is meant to save. It is marked so (`READS_FLOAT`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from quark.account import AlgorithmFacts
from quark.decide.view import Array, Node
from quark.features.protection.on_onnx import protect_structures
from quark.features.smooth_quant.folding import Edit, Reader
from quark.features.smooth_quant.groups import NAME, smooth_graph, steps_of, tensors_to_survey
from quark.features.smooth_quant.options import SMOOTH_SAMPLES, SmoothOptions
from quark.features.smooth_quant.outliers import split_outliers
from quark.features.smooth_quant.smoothing import ChannelMoments, ChannelStatistics, Steps
from quark.onnx.calibrate import FloatRunner, survey
from quark.onnx.deciding import Work
from quark.onnx.graph import (
    READS_FLOAT,
    add_initializer,
    add_node,
    constant,
    in_dtype,
    input_value,
    replace_input,
    set_constant,
)
from quark.onnx.view import view_of


def before_calibration(work: Work, options: SmoothOptions) -> list[AlgorithmFacts]:
    """Smooth the model in place, for the integers that the configuration asks for."""
    # smoothing would make the weights of products whose input stays in float harder to round, for nothing
    road = OnnxRoad(work.model, frozenset(protect_structures(work.model, work.settings)[1].weights_only))
    tensors = smooth_tensors(work.model, road.left_out)
    wanted = {name: ChannelMoments(axis) for name, axis in tensors.items()}
    moments_by_name: dict[str, ChannelMoments] = {}
    if wanted:
        calibrate = work.settings.calibrate
        with FloatRunner(work.model, wanted, providers=calibrate.providers) as runner:
            moments_by_name = survey(runner, wanted, work.samples, calibrate, sample_limit=SMOOTH_SAMPLES)
    statistics = {name: moments.statistics for name, moments in moments_by_name.items()}
    split = split_outliers(work.model, statistics, road) if options.alpha is None else None
    steps = steps_of(work.settings.choose.default)
    smoothed = smooth_graph(view_of(work.model), road, options, statistics, steps)
    return [smoothed] if split is None else [split, smoothed]


def smooth_tensors(model: ir.Model, left_out: Collection[str] = ()) -> dict[str, int]:
    """The tensors whose statistics `smooth` needs, each with the axis of its channels, from the end. `left_out` are the
    names of nodes that are not smoothed."""
    return tensors_to_survey(view_of(model), OnnxRoad(model, frozenset(left_out)))


def smooth(
    model: ir.Model, options: SmoothOptions, statistics: Mapping[str, ChannelStatistics], steps: Steps | None = None
) -> AlgorithmFacts:
    """Smooth, in place, what gains by it."""
    return smooth_graph(view_of(model), OnnxRoad(model), options, statistics, steps or Steps())


@dataclass(frozen=True)
class OnnxRoad:
    """See `quark.features.smooth_quant.folding.Road`. A constant that is also read elsewhere is copied before it is
    changed, except for the weight that the layers of a group share. `left_out` are nodes that are not smoothed."""

    model: ir.Model
    left_out: frozenset[str] = frozenset()

    def obstacle(self, node: Node) -> str | None:
        if node.name in self.left_out:
            return "its input stays in float"
        is_known = node.is_standard or node.origin.domain == "com.microsoft"
        return None if is_known else f"an operator of domain '{node.origin.domain}'"

    def is_possible(self, edit: Edit) -> bool:
        return self._result(edit) is not None

    def write(self, edits: Sequence[Edit]) -> None:
        for edit in edits:
            array = self._result(edit)
            assert array is not None
            if edit.is_by_input:
                value = edit.node.origin.inputs[edit.index]
                value.const_value = ir.Tensor(array, name=value.name)
            else:
                set_constant(self.model, edit.node.origin, edit.index, array)

    def insert_mul(self, readers: Sequence[Reader], factor: Array) -> None:
        first, index = readers[0][0].origin, readers[0][1]
        value, weight = first.inputs[index], constant(first.inputs[1 - index])
        assert weight is not None
        held = add_initializer(self.model, f"{value.name}_smooth", factor.astype(weight.dtype))
        mul = add_node(self.model, "Mul", [value, held], before=first, name=f"{first.name}_smooth")
        mul.meta[READS_FLOAT] = NAME
        mul.outputs[0].shape = value.shape
        for node, index in readers:
            replace_input(node.origin, index, mul.outputs[0])

    def _result(self, edit: Edit) -> Array | None:
        """The new constant; None if there is none, or if it does not fit its type."""
        array = constant(input_value(edit.node.origin, edit.index))
        return None if array is None else in_dtype(array.astype(np.float64) * edit.factor, array)
