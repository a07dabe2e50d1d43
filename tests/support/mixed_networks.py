"""A network with a layer that 8 bits of activations are too few for, and what is wanted of mixing it."""

from __future__ import annotations

import numpy as np
from onnx_models import Net

from quark.onnx import CalibrationMethod, ExtendedQuantType, QuantizationConfig, QuantType

S8, S16, BF16 = QuantType.QInt8, ExtendedQuantType.QInt16, ExtendedQuantType.QBFloat16
BFP, MX = ExtendedQuantType.QBFP, ExtendedQuantType.QMX
LAYERS = ("first", "second", "sensitive", "third", "head")
CLASSES = 5


def mixed_network():
    """Four convolutions and a Gemm. What `sensitive` reads has one channel two hundred times larger than the others,
    which it makes nothing of: its own weights are as good as those of others."""
    net = Net()
    x = net.input("x", ("N", 4, 6, 6))
    y = net.node("Relu", net.conv(x, (4, 8), pads=[1] * 4, name="first"))
    wide = net.random.standard_normal((8, 8, 1, 1)).astype(np.float32) / 2
    narrow = net.random.standard_normal((8, 8, 3, 3)).astype(np.float32) / 4
    wide[3] *= 200
    narrow[:, 3] = 0
    y = net.node("Conv", y, net.constant(wide), name="second")
    y = net.node("Conv", y, net.constant(narrow), name="sensitive", pads=[1] * 4)
    y = net.node("Relu", y)
    y = net.node("Relu", net.conv(y, (8, 6), 1, name="third"))
    y = net.node("Flatten", net.node("GlobalAveragePool", y))
    y = net.node("Gemm", y, net.weight(6, CLASSES), net.weight(CLASSES), name="head", output="logits")
    return net.model(y, output_shape=("N", CLASSES))


def images(count=24, seed=5):
    random = np.random.default_rng(seed)
    return [{"x": random.standard_normal((1, 4, 6, 6)).astype(np.float32)} for _ in range(count)]


def mixed_config(high=(S16, S8), low=(S8, S8), *, extra=None, **settings):
    """A config from the higher (activation, weight) types to the lower ones."""
    types = {"ActTargetQuantType": low[0], "WeightTargetQuantType": low[1]}
    return QuantizationConfig(
        calibrate_method=CalibrationMethod.MinMax,
        activation_type=high[0],
        weight_type=high[1],
        per_channel=True,
        include_auto_mp=True,
        print_summary=False,
        extra_options={"ActivationSymmetric": True, **(extra or {}), "AutoMixprecision": {**types, **settings}},
    )
