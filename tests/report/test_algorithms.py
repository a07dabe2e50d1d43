"""What algorithms did is told in a line, and where they did nothing, so that nobody misses it."""

from __future__ import annotations

import pytest

from quark.account import AlgorithmFacts
from quark.plan import SkippedNode
from quark.report.algorithms import BIAS_CORRECTION, CROSS_LAYER, NPU_POSITIONS, SMOOTH, algorithm_line, idle_remark


def test_the_names_are_those_that_the_algorithms_have():
    from quark.decide import npu_positions
    from quark.features.bias_correction import layers as bias_correction
    from quark.features.equalization import cross_layer
    from quark.features.smooth_quant import groups as smooth_quant

    assert cross_layer.NAME == CROSS_LAYER
    assert smooth_quant.NAME == SMOOTH
    assert bias_correction.NAME == BIAS_CORRECTION
    assert npu_positions.NAME == NPU_POSITIONS


def left(*reasons: str) -> tuple[SkippedNode, ...]:
    return tuple(SkippedNode(f"n{i}", "Conv", reason) for i, reason in enumerate(reasons))


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        (AlgorithmFacts(CROSS_LAYER, ("a", "b")), "cross-layer equalization: 2 regions"),
        (AlgorithmFacts(BIAS_CORRECTION, ("a",), left("no bias")), "bias correction: 1 layer; left 1: no bias"),
        (
            AlgorithmFacts(CROSS_LAYER, ("a",), left("x", "y", "y", "z")),
            "cross-layer equalization: 1 region; left 4: y (2), x (1) and 1 more",
        ),
        (AlgorithmFacts("another", ("a", "b")), "another: 2 changes"),
        (AlgorithmFacts(SMOOTH, (), left("x", "y", "y")), "SmoothQuant: changed nothing: y"),
        (AlgorithmFacts(NPU_POSITIONS, ()), "npu positions: all within the limits as they are"),
        (AlgorithmFacts(NPU_POSITIONS, ("a",), left("x")), "npu positions: 1 position; left 1: x"),
        (AlgorithmFacts(NPU_POSITIONS, (), left("x")), "npu positions: 0 positions; left 1: x"),
    ],
)
def test_lines(facts, line):
    assert algorithm_line(facts) == line


def test_a_reason_that_names_the_operator_counts_once():
    nodes = tuple(SkippedNode(op, op, f"operator {op} is not scaled") for op in ("Tanh", "Erf"))
    assert algorithm_line(AlgorithmFacts(CROSS_LAYER, ("a",), nodes)).endswith("left 2: operator is not scaled")


def test_reasons_that_differ_in_names_and_numbers_are_told_by_the_first():
    facts = AlgorithmFacts(CROSS_LAYER, ("a",), left("'x' is an output", "no gain (-0.1 dB)", "'y' is an output"))
    assert algorithm_line(facts).endswith("left 3: 'x' is an output (2), no gain (-0.1 dB) (1)")


def test_an_algorithm_that_did_nothing_is_remarked_on():
    assert idle_remark(AlgorithmFacts(SMOOTH, ())) == "SmoothQuant found nothing to do"
    assert idle_remark(AlgorithmFacts(SMOOTH, (), left("y"))) == "SmoothQuant changed nothing: y"
    assert idle_remark(AlgorithmFacts(SMOOTH, ("a",), left("y"))) is None


def test_positions_are_remarked_on_where_limits_do_not_hold():
    assert idle_remark(AlgorithmFacts(NPU_POSITIONS, ())) is None
    assert idle_remark(AlgorithmFacts(NPU_POSITIONS, ("a",))) is None
    assert idle_remark(AlgorithmFacts(NPU_POSITIONS, ("a",), left("x"))) == "1 limit of the NPU not kept: x"
