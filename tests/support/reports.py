"""Reports made by hand, one for each verdict."""

from __future__ import annotations

from quark.account import CalibrationFacts, FileFacts, Report, Rewrite
from quark.compare import OutputFidelity
from quark.plan import AffineChoice, QuantizationPlan, Reader, Role, SkippedNode, TensorChoice

OUTPUTS = {
    "ok": (OutputFidelity("logits", 0.9991, 27.4, 0.97, 0.4),),
    "degraded": (OutputFidelity("logits", 0.93, 8.5, 0.81, 2.5), OutputFidelity("features", 0.99, 17.0, None, 0.1)),
    "collapsed": (OutputFidelity("logits", 0.1, float("-inf"), 0.01, float("inf")),),
    "unchecked": (),
}


def make_report(verdict="ok", **changes):
    tensors = [
        TensorChoice(f"x{i}", Role.ACTIVATION, AffineChoice("uint8", (0.1,), (128,)), (Reader(f"conv{i}", 0),), "input")
        for i in range(5)
    ]
    tensors += [
        TensorChoice(f"w{i}", Role.WEIGHT, AffineChoice("int8", (0.1,), (0,)), (Reader(f"conv{i}", 1),), "weight")
        for i in range(5)
    ]
    skipped = tuple(SkippedNode(f"softmax{i}", "Softmax", "no integer kernel for it") for i in range(3))
    fields = {
        "config_name": "XINT8",
        "config": {"per_channel": False},
        "versions": {"quark": "0.1.0"},
        "source": FileFacts("float.onnx", 13_600_000, "0" * 64),
        "result": FileFacts("small.onnx", 3_500_000, "1" * 64),
        "plan": QuantizationPlan(tuple(tensors), skipped),
        "calibration": CalibrationFacts("folder calib", 24, 8, ("power-of-two MinMSE",)),
        "outputs": OUTPUTS[verdict],
        "rewrites": (Rewrite("fold_batch_norm", 5),),
        "remarks": ("opset lifted from 11 to 13",),
        "op_types": {f"conv{i}": "Conv" for i in range(5)},
    }
    return Report(**{**fields, **changes})
