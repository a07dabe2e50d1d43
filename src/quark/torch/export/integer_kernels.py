"""What a file needs for ONNX Runtime's integer kernels, beyond the quantizers of the network.

A convolution whose Relu or Clip the runtime keeps is no integer kernel unless the same quantizer stands on both sides
of that activation; it changes no value (`quark.onnx.choose.before_clips` has the reason). Files with power-of-two
scales are for NPUs, which compute both at once: there nothing is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx_ir as ir

from quark.onnx.choose.before_clips import choices_before_clips
from quark.onnx.choose.placement import FusedActivation
from quark.onnx.graph import is_read_once
from quark.plan import AffineChoice, QuantizationPlan, Role, TensorChoice

_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Add")


def kernel_choices(model: ir.Model, plan: QuantizationPlan) -> dict[str, TensorChoice]:
    """Those quantizers, by the name of the activation's result, which is rounded before its own quantizer then."""
    return {} if _is_for_npus(plan) else choices_before_clips(model, _fused(model, plan), plan)


def _fused(model: ir.Model, plan: QuantizationPlan) -> Iterator[FusedActivation]:
    """Relu and Clip behind a layer that computes with quantized numbers, where nothing else reads its result."""
    quantized = {reader.node for each in plan for reader in each.readers}
    choices: dict[str, int] = {}
    for each in plan:
        choices[each.tensor] = choices.get(each.tensor, 0) + len(each.readers)
    for node in model.graph:
        value = node.inputs[0] if node.inputs and node.op_type in ("Relu", "Clip") else None
        producer = None if value is None else value.producer()
        if value is None or producer is None or producer.op_type not in _LAYERS or producer.name not in quantized:
            continue
        result = node.outputs[0]
        reads = len(result.uses()) + sum(output is result for output in model.graph.outputs)
        if is_read_once(value) and str(value.name) not in choices and choices.get(str(result.name)) == reads:
            yield FusedActivation(str(value.name), str(node.name), str(result.name))


def _is_for_npus(plan: QuantizationPlan) -> bool:
    scales = [
        each.choice.scale[0] for each in plan if each.role is Role.ACTIVATION and isinstance(each.choice, AffineChoice)
    ]
    return all(math.frexp(scale)[0] == 0.5 for scale in scales)
