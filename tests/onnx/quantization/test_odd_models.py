"""Models that a quantizer stumbles over come out valid, close to float, and the same whoever runs them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from odd_models import ODD_MODELS, odd_feed
from onnx_models import Net, random_feed

from quark.errors import InvalidValueError
from quark.fidelity import Verdict
from quark.onnx import get_library_path, quantize

ALWAYS = ("XINT8", "U8S8_AAWS", "UINT8_DYNAMIC_QUANT", "MXINT8")
IN_TURN = (
    *("VINT8", "A8W8", "A16W8", "S8S8_AAWS", "U8U8_AAWA", "U16S8_AAWS", "S16S8_ASWS", "INT16_CNN_DEFAULT"),
    *("INT8_TRANSFORMER_DEFAULT", "FP16", "BF16", "BFP16", "MX6", "MXFP8E4M3", "BF16_BFP16", "BF16_MXINT8"),
    *("MX9_INT8", "MATMUL_NBITS", "INT8_CNN_DEFAULT"),
)
# Moving averages of few samples, 4 and 6 bits.
COARSE = ("INT8_CNN_DEFAULT", "INT8_TRANSFORMER_DEFAULT", "MX6", "MATMUL_NBITS")
BEYOND_FLOAT16 = ("extremes", "FP16")


def cases():
    """Each model with the presets of `ALWAYS`, and with three of the others in turn."""
    for number, name in enumerate(ODD_MODELS):
        turn = [IN_TURN[(number * 3 + i) % len(IN_TURN)] for i in range(3)]
        yield from ((name, preset) for preset in (*ALWAYS, *turn) if (name, preset) != BEYOND_FLOAT16)


def outputs_of(model, feeds, *, has_library=True, has_optimizations=True):
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if has_library:
        options.register_custom_ops_library(get_library_path())
    if not has_optimizations:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    return [session.run(None, feed) for feed in feeds]


def sqnr(actual, expected):
    """Over all outputs and samples, in decibels."""
    pairs = [(a.astype(np.float64), b.astype(np.float64)) for x, y in zip(actual, expected, strict=True)
             for a, b in zip(x, y, strict=True)]  # fmt: skip
    noise = sum(np.square(a - b).sum() for a, b in pairs)
    return 10 * np.log10(sum(np.square(b).sum() for _, b in pairs) / max(noise, 1e-300))


def is_valid(model):
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True


@pytest.mark.parametrize(("name", "preset"), list(cases()))
def test_odd_models_come_out_valid_and_close_to_float(name, preset):
    model = onnx.shape_inference.infer_shapes(ODD_MODELS[name]())
    before = model.SerializeToString()
    feeds = [odd_feed(model, seed) for seed in range(8)]
    result = quantize(model, feeds, preset)
    assert model.SerializeToString() == before
    assert is_valid(result.model) or not is_valid(model)
    expected = outputs_of(model, feeds, has_library=False)
    actual = outputs_of(result.model, feeds)
    for one, other in zip(actual[0], expected[0], strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert sqnr(actual, expected) > (6 if preset in COARSE else 20)
    assert sqnr(outputs_of(result.model, feeds, has_optimizations=False), actual) > 25
    assert sqnr(outputs_of(result.model, feeds, has_library=False), actual) > 60


def masked_attention(mask):
    net = Net()
    x, keep = net.input("x", (2, 5, 8)), net.input("keep", (2, 1, 5), np.bool_)
    q, k, v = (net.node("MatMul", x, net.weight(8, 8)) for _ in range(3))
    scores = net.node("MatMul", q, net.node("Transpose", k, perm=[0, 2, 1]))
    scores = net.node("Where", keep, scores, net.constant(mask), output="masked")
    return net.model(net.node("MatMul", net.node("Softmax", scores), v))


def masked_samples(model):
    keep = np.array([[[True, True, False, True, False]]] * 2)
    return [random_feed(model, seed) | {"keep": keep} for seed in range(6)]


def test_infinite_masks_are_refused_by_name():
    model = masked_attention(-np.inf)
    with pytest.raises(InvalidValueError, match="'masked'.*sample 0.*NaN or Inf"):
        quantize(model, masked_samples(model), "S8S8_AAWS")
    assert quantize(model, masked_samples(model), "MXINT8").report.verdict is Verdict.OK


def test_what_huge_masks_do_to_integers_is_not_called_ok():
    model = masked_attention(-3.4e38)
    assert quantize(model, masked_samples(model), "S8S8_AAWS").report.verdict is not Verdict.OK
    assert quantize(model, masked_samples(model), "BF16").report.verdict is Verdict.OK


def test_a_matrix_product_of_more_dimensions_is_left_out_of_nbits():
    result = quantize(ODD_MODELS["products"](), None, "MATMUL_NBITS")
    reasons = {each.reason for each in result.plan.skipped}
    assert "MatMulNBits takes a weight of two dimensions only" in reasons
