"""Which nodes are quantized, where that is not told by the plans of whole networks."""

import numpy as np
import pytest
from onnx_models import Net

from quark.onnx import get_default_config, quantize


@pytest.mark.parametrize("op_type", ["GlobalMaxPool", "Relu", "Add"])
def test_weights_in_groups_pass_over_operators_that_have_none(op_type):
    """An operator that is asked for, and has no matrix for a weight, stays in float."""
    net = Net(opset=17)
    x = net.input("x", (1, 3, 4, 128))
    y = net.node("MatMul", x, net.weight(128, 16))
    model = net.model(net.node(op_type, y, *([y] if op_type == "Add" else [])))
    config = get_default_config("MATMUL_NBITS")
    config.extra_op_types_to_quantize = [op_type]
    result = quantize(model, np.zeros((1, 3, 4, 128), np.float32), config)
    assert [(node.op_type, "two dimensions" in node.reason) for node in result.plan.skipped] == [(op_type, True)]
