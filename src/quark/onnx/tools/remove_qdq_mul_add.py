"""Remove the quantizers between a Mul and the Add behind it."""

from __future__ import annotations

import onnx

from quark.onnx.convert.quantizers import remove_qdq_between
from quark.onnx.tools.command import Argument, ModelTool
from quark.onnx.tools.remove_qdq_between_ops import find_node_by_output
from quark.text import get_logger

__all__ = ["TOOL", "find_node_by_output", "main", "remove_qdq_mul_add"]

logger = get_logger(f"{__name__}_screen")  # the name by which scripts filter messages


def remove_qdq_mul_add(onnx_model: onnx.ModelProto) -> onnx.ModelProto:
    """Connect every Add directly to the result of a Mul, without the quantizer between them.

    A quantizer whose result something else reads too stays. The model that was passed does not change.
    """
    result, left = remove_qdq_between(onnx_model, [("Mul", "Add")])
    for place in left:
        logger.debug("Skip pattern match: %s.", place)
    logger.info("Removed QuantizeLinear & DequantizeLinear operations: mul-add.")
    return result


TOOL = ModelTool(
    "Remove QuantizeLinear and DequantizeLinear between Mul and Add.",
    Argument("--input_model", "the quantized model"),
    Argument("--output_model", "the model to write"),
    change=remove_qdq_mul_add,
)
main = TOOL.run

if __name__ == "__main__":
    main()
