"""Which layers could be lowered, and what they hold and compute, counted by hand."""

from __future__ import annotations

import onnx_ir as ir
import pytest
from onnx_models import Net

from quark.decide import AffineSpec, LayerSpec
from quark.errors import UnknownNameError
from quark.features.mixed_precision.networks import candidates
from quark.features.mixed_precision.options import MixOptions
from quark.onnx.load import load

LOW = LayerSpec(AffineSpec("int8"), AffineSpec("int8"))


def network() -> ir.Model:
    net = Net()
    x = net.input("x", ("N", 4, 8, 8))
    y = net.conv(x, (4, 6), 3, strides=[2, 2], name="conv")  # 6 channels of 3 by 3
    y = net.conv(y, (6, 6), 3, group=6, pads=[1] * 4, name="depthwise")
    y = net.conv(y, (6, 2), 2, op_type="ConvTranspose", name="transposed")
    y = net.node("Flatten", y)
    y = net.node("Gemm", y, net.weight(32, 5), name="gemm")
    z = net.input("z", ("N", 7, 32))
    w = net.node("MatMul", z, net.weight(32, 5), name="matmul")
    v = net.node("MatMul", w, net.input("u", ("N", 5, 9)), name="product")
    return load(net.model(y, v)).model


def found(**options):
    model = network()
    names = [str(node.name) for node in model.graph]
    return {
        candidate.layer: (candidate.weights, candidate.macs)
        for candidate in candidates(model, names, MixOptions(LOW, **options))
    }


def test_weights_and_multiplications():
    assert found() == {
        "conv": (216, 216 * 9),
        "depthwise": (54, 54 * 9),
        "transposed": (48, 48 * 9),
        "gemm": (160, 160),
        "matmul": (160, 160 * 7),
        "product": (0, 5 * 7 * 9),
    }


def test_unknown_shapes_are_not_counted():
    net = Net()
    x = net.input("x", (1, 4, "height", 8))
    model = load(net.model(net.conv(x, (4, 6), name="conv"))).model
    assert [candidate.macs for candidate in candidates(model, ["conv"], MixOptions(LOW))] == [None]


def test_operators_and_names_choose():
    assert list(found(op_types=frozenset({"Gemm"}))) == ["gemm"]
    assert list(found(included=("conv", "ma.*"))) == ["conv", "matmul"]
    assert list(found(included=("conv", "gemm"), excluded=("g.*m",))) == ["conv"]
    assert list(found(op_types=frozenset({"Flatten"}))) != []


@pytest.mark.parametrize("option", ["included", "excluded"])
def test_a_name_that_finds_nothing_is_an_error(option):
    with pytest.raises(UnknownNameError, match="no node"):
        found(**{option: ("conf",)})
