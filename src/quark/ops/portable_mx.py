"""MXQuantizeDequantize as a function of ordinary ONNX operators."""

from __future__ import annotations

from onnx import FunctionProto

from quark.formats.catalog import MX_ELEMENTS
from quark.formats.spec import NonFinite
from quark.ops.function_body import BOOL, FunctionBody
from quark.ops.portable_blocks import BlockArithmetic, narrowed, quantize_dequantize, widened_input
from quark.ops.portable_elements import Elements
from quark.ops.portable_layout import BlockLayout
from quark.ops.portable_mse import within_reach
from quark.ops.schema import MX_QUANTIZE_DEQUANTIZE


def mx_function(opset: int) -> FunctionProto:
    """The function for a model of that opset."""
    body = FunctionBody(opset)
    attribute = MX_QUANTIZE_DEQUANTIZE.attribute
    grids = [element.grid for element in MX_ELEMENTS.values()]
    elements = Elements.of(body, grids, body.place(attribute("element_dtype"), tuple(MX_ELEMENTS)))
    policy = body.place(attribute("nonfinite"), attribute("nonfinite").choices)
    passes = policy.lookup([choice is NonFinite.PASSTHROUGH for choice in NonFinite], BOOL)
    x, wide = widened_input(body)
    block = within_reach(body.integer(attribute("block_size")), elements.is_mse)
    layout = BlockLayout.of(wide, body.integer(attribute("axis")), block)
    arithmetic = BlockArithmetic(elements, layout, passes, lambda y, shape: y.on_flat(elements.quantize, shape))
    out = quantize_dequantize(wide, arithmetic)
    return body.function(MX_QUANTIZE_DEQUANTIZE, narrowed(out, x), MX_QUANTIZE_DEQUANTIZE.defaults)
