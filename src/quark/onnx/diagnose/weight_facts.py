"""How many bits a parameter takes: in the float file, by the formats of the quantized one, and as that lies on disk."""

from __future__ import annotations

import onnx_ir as ir

from quark.diagnosis import WeightFacts
from quark.onnx.diagnose.layer_facts import LayerFacts
from quark.onnx.graph import FLOAT_TYPES


def find_weight_facts(exact: ir.Model, quantized: ir.Model, layers: list[LayerFacts]) -> WeightFacts | None:
    """None for a network without parameters. Weights of the layers count by their format, with scales; other
    parameters, biases too, as in the float file."""
    held = [value.const_value for value in exact.graph.initializers.values()]
    floats = [each for each in held if each is not None and each.dtype in FLOAT_TYPES]
    parameters = sum(int(each.size) for each in floats)
    if not parameters:
        return None
    float_bits = 8 * sum(int(each.nbytes) for each in floats) / parameters
    by_weight = {id(each.site.weight.source): each for each in layers if each.site.weight is not None}
    counted = [(each.parameters, each.site.weight.bits) for each in by_weight.values() if each.site.weight is not None]
    in_formats = min(parameters, sum(count for count, _ in counted))
    format_bits = (sum(count * bits for count, bits in counted) + (parameters - in_formats) * float_bits) / parameters
    stored = sum(
        int(value.const_value.nbytes)
        for value in quantized.graph.initializers.values()
        if value.const_value is not None
    )
    return WeightFacts(parameters, float_bits, format_bits, 8 * stored / parameters)
