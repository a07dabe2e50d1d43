"""Remove the quantizers between pairs of operators, such as Conv and Relu."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx

from quark.onnx.convert.quantizers import remove_qdq_between
from quark.onnx.tools.command import Argument, ModelTool
from quark.text import get_logger

logger = get_logger(f"{__name__}_screen")  # the name by which scripts filter messages


def remove_qdq_between_ops(model: onnx.ModelProto, between_ops: Sequence[tuple[str, str]]) -> onnx.ModelProto:
    """Connect the second operator of each pair directly to the first one's result, without the quantizer between them.

    A quantizer whose result something else reads too stays. The model that was passed does not change.
    """
    result, left = remove_qdq_between(model, between_ops)
    for place in left:
        logger.debug("Skip pattern match: %s.", place)
    logger.info("Removed QuantizeLinear & DequantizeLinear operations: %s.", between_ops)
    return result


def find_node_by_output(nodes: Iterable[onnx.NodeProto], output_name: str) -> onnx.NodeProto | None:
    """The node that computes a value, or None."""
    return next((node for node in nodes if output_name in node.output), None)


def _pairs(text: str) -> list[tuple[str, ...]]:
    return [tuple(name.strip() for name in pair.split(",")) for pair in text.split(";")]


TOOL = ModelTool(
    "Remove QuantizeLinear and DequantizeLinear between pairs of operators.",
    Argument("--input_model", "the quantized model"),
    Argument("--output_model", "the model to write"),
    Argument("--between_ops", "the pairs, such as 'Conv,Relu;Conv,PRelu;Mul,Add'", type=_pairs),
    change=remove_qdq_between_ops,
)
main = TOOL.run

if __name__ == "__main__":
    main()
