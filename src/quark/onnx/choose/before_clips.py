"""Quantizers between an operator and its Relu or Clip, where ONNX Runtime would not drop that.

It does so only where the lowest code stands for zero or more. Elsewhere the same quantizer before and behind the
activation changes no value (rounding is monotone, and a rounded number rounds to itself) and leaves the operator
between two quantizers, so that it becomes an integer kernel. Before any other activation it would change values.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from quark.formats.catalog import get_format
from quark.formats.spec import IntFormat
from quark.onnx.choose.placement import FusedActivation
from quark.plan import AffineChoice, Choice, Reader, Role, TensorChoice

_CLIPS = ("Relu", "Clip")


def choices_before_clips(
    model: ir.Model, fused: Iterable[FusedActivation], decided: Iterable[TensorChoice]
) -> dict[str, TensorChoice]:
    """The additional quantizers, by the name of the activation's output."""
    clips = {str(node.name) for node in model.graph if node.op_type in _CLIPS}
    after: dict[str, set[Choice]] = {}
    for each in decided:
        if each.role is Role.ACTIVATION:
            after.setdefault(each.tensor, set()).add(each.choice)
    found: dict[str, TensorChoice] = {}
    for pair in fused:
        choices = after.get(pair.output, set())
        choice = next(iter(choices)) if len(choices) == 1 else None
        if pair.activation in clips and isinstance(choice, AffineChoice) and _keeps_activation(choice):
            reason = "the same as behind the activation, for an integer kernel"
            reader = Reader(pair.activation, 0)
            found[pair.output] = TensorChoice(pair.tensor, Role.ACTIVATION, choice, (reader,), reason)
    return found


def _keeps_activation(choice: AffineChoice) -> bool:
    fmt = get_format(choice.format)
    assert isinstance(fmt, IntFormat)
    return fmt.bits <= 8 and choice.zero_point[0] != fmt.qmin
