"""Odd models through the presets: a file that loads, with the outputs of the float model and near them, or a reason.

The quick tests give every model one preset and every preset a model; the slow ones try all pairs. Where there is no
torch, presets that finetune are left out.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import re

import numpy as np
import onnx
import pytest
from odd_collection import EVERY_ODD_MODEL, RUNTIME, calibration_of, made
from odd_operators import OPSETS, REMOVED, SINCE, WITHOUT_KERNEL, operators_at
from odd_runs import Outputs, is_valid, run, sqnr_db
from onnx_models import Net, random_feed

from quark.compare import Verdict
from quark.decide.operators import OPERATORS
from quark.errors import InvalidValueError, ModelError, QuarkError
from quark.onnx import get_default_config, quantize
from quark.onnx.quantization.presets import PRESETS

SEED = 8
# Finetuning takes its time for each of 200 layers, and the runtime to put portable functions into their places.
TOO_LARGE_FOR_MOST = {"deep_chain": "A8W8"}
# The least SQNR in decibels by what a preset's name begins with, the first that fits. None: finite is all it has to be.
FLOORS: tuple[tuple[str, float | None], ...] = (
    ("MX4|MXFP4|NVFP4|MATMUL_NBITS|INT4|A(8|16)W4|.*_MXFP4", None),  # 4 bits
    ("MXFP8E5M2|MXFP6E3M2|FP8E5M2", 8.0),  # 2 bits of significand: about 12 dB for a layer, less behind several
    ("MX6|MXFP6|MXFP8|FP8E4M3", 12.0),  # 3 or 4
    ("INT(8|16)_TRANSFORMER_DEFAULT|INT8_CNN_DEFAULT|A8W8", 10.0),  # ranges averaged over a few samples
    ("INT16|A16W8|S16S8|U16S8|FP16|BF16$|BF16_ADAQUANT", 25.0),
    ("", 15.0),  # 8 bits somewhere
)
# Models on which presets may fall short of their floor, and by how many decibels.
FALLS_SHORT = {
    "deep_chain": (".*", 25.0),  # the errors of 200 layers add up
    "extremes": ("FP16", 50.0),  # float16 ends at 65504, where it saturates
    "huge": ("FP16", 50.0),
    "tiny": ("FP16", 50.0),
    "saturated": ("VINT8", 12.0),  # it quantizes what is before a Clip, here in steps of 8 where 6 is the bound
}
# Which preset may refuse which model, and with which words.
REFUSALS = {
    "sparse_constant": (".*", "is sparse, which cannot be quantized"),
    "empty_batch": (".*", "holds no value"),
    # three rewrites of ONNX Runtime contradict each other behind a lone int8 layer from opset 21 on
    "transformer 21": ("S16S16_MIXED_S8S8", "output_dtype INT8 does not match y_zero_point"),
}
if RUNTIME < (1, 27):
    # Between 8-bit layers ONNX Runtime computes a cubic Resize on integers, for which it has no kernel (to 1.26), or
    # moves the channels to the end, where it does not take them (to 1.21); it does so with one left in float, too.
    REFUSALS["resize cubic"] = (".*", "'Cubic' mode only support|Tensor type mismatch")
USED_PRESETS = [name for name, row in PRESETS.items() if not row.is_trained or importlib.util.find_spec("torch")]


def may_refuse(name: str, preset: str) -> str | None:
    presets, words = REFUSALS.get(name, ("(?!)", ""))
    return words if re.match(presets, preset) else None


def floor_of(name: str, preset: str) -> float | None:
    floor = next(least for start, least in FLOORS if re.match(start, preset))
    presets, allowance = FALLS_SHORT.get(name, ("(?!)", 0.0))
    return None if floor is None else floor - (allowance if re.match(presets, preset) else 0.0)


def covering_pairs():
    """Every model once and every preset at least once, in an order that `SEED` says."""
    presets = random.Random(SEED).sample(sorted(USED_PRESETS), len(USED_PRESETS))
    turns = zip(EVERY_ODD_MODEL, itertools.cycle(presets), strict=False)
    pairs = [(name, TOO_LARGE_FOR_MOST.get(name, preset)) for name, preset in turns]
    left = set(presets).difference(preset for _, preset in pairs)
    return pairs + [(next(iter(EVERY_ODD_MODEL)), preset) for preset in sorted(left)]


def forms(outputs: Outputs):
    return [[(each.shape, each.dtype) for each in sample] for sample in outputs]


def has_half(model: onnx.ModelProto) -> bool:
    """Then the runtime computes fewer nodes together, and what differs by a bit of float16 may round the other way."""
    return any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in model.graph.initializer)


def judge(name: str, preset: str, folder) -> None:
    before = made(name).SerializeToString()
    try:
        found = run(name, preset, folder)
    except QuarkError as error:
        words = may_refuse(name, preset)
        if words is None or re.search(words, str(error)) is None:
            raise
        return
    assert made(name).SerializeToString() == before
    assert is_valid(found.model) or not is_valid(found.float_model)
    names = [[each.name for each in model.graph.output] for model in (found.model, found.float_model)]
    assert names[0] == names[1]
    assert forms(found.native) == forms(found.portable) == forms(found.expected)
    assert all(np.isfinite(each).all() for sample in found.native for each in sample if each.dtype.kind == "f")
    assert sqnr_db(found.portable, found.native) > (40 if has_half(found.float_model) else 60)
    floor = floor_of(name, preset)
    assert floor is None or sqnr_db(found.native, found.expected) > floor


@pytest.mark.parametrize(("name", "preset"), covering_pairs())
def test_every_model_and_every_preset(name, preset, tmp_path):
    judge(name, preset, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", EVERY_ODD_MODEL)
def test_every_model_with_every_preset(name, tmp_path):
    failures = {}
    for preset in USED_PRESETS:
        (tmp_path / preset).mkdir()
        try:
            judge(name, preset, tmp_path / preset)
        except Exception as error:
            failures[preset] = f"{type(error).__name__}: {error}"[:300]
    assert not failures


def test_there_are_odd_models_enough_and_each_table_names_one():
    assert len(EVERY_ODD_MODEL) >= 50
    assert {preset for _, preset in covering_pairs()} == set(USED_PRESETS)
    assert {*REFUSALS, *FALLS_SHORT} <= set(EVERY_ODD_MODEL)


@pytest.mark.parametrize("opset", dict.fromkeys(OPSETS))
def test_the_networks_have_every_operator_that_can_be_quantized(opset):
    models = [made(name) for name in operators_at(opset)]
    used = {node.op_type for model in models for node in model.graph.node}
    there = {op_type for op_type in OPERATORS if SINCE.get(op_type, 1) <= opset < REMOVED.get(op_type, 1000)}
    recurrent = {"GRU", "LSTM", "RNN"}  # tests/onnx/quantization/test_recurrent.py has them
    assert there - used == WITHOUT_KERNEL | recurrent
    assert all(model.opset_import[0].version == opset for model in models)
    assert set(REMOVED) <= {node.op_type for node in made("upsample_opset_9").graph.node}


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


def unprotected(preset):
    config = get_default_config(preset)
    config.extra_options["Protect"] = "none"
    return config


def test_infinite_masks_are_refused_by_name_unless_they_are_protected():
    model = masked_attention(-np.inf)
    with pytest.raises(InvalidValueError, match="'masked'.*sample 0.*NaN or Inf"):
        quantize(model, masked_samples(model), unprotected("S8S8_AAWS"))
    for preset in ("S8S8_AAWS", "MXINT8"):
        assert quantize(model, masked_samples(model), preset).report.verdict is Verdict.OK


def test_what_huge_masks_do_to_integers_is_not_called_ok_and_is_protected():
    model = masked_attention(-3.4e38)
    assert quantize(model, masked_samples(model), unprotected("S8S8_AAWS")).report.verdict is not Verdict.OK
    for preset in ("S8S8_AAWS", "BF16"):
        assert quantize(model, masked_samples(model), preset).report.verdict is Verdict.OK


def test_a_matrix_product_of_more_dimensions_is_left_out_of_nbits():
    result = quantize(made("products"), None, "MATMUL_NBITS")
    reasons = {node.reason for node in result.plan.skipped}
    assert "MatMulNBits takes a weight of two dimensions only" in reasons


def test_a_maximum_that_starts_at_minus_infinity_is_left_in_float():
    net = Net()
    y = net.node("MatMul", net.input("x", (2, 6)), net.weight(6, 6))
    y = net.node("Max", net.constant(-np.inf), net.node("ReduceMax", y, axes=[1], keepdims=1))
    model = net.model(net.node("MatMul", y, net.weight(1, 3)))
    samples = [random_feed(model, seed) for seed in range(6)]
    result = quantize(onnx.shape_inference.infer_shapes(model), samples, "XINT8")
    assert "one of its constants holds NaN or Inf, which has no scale" in {node.reason for node in result.plan.skipped}


def test_an_input_with_a_default_is_calibrated_without_being_fed():
    config = get_default_config("A8W8")
    config.extra_options["RemoveInputInit"] = False
    result = quantize(made("initializers_as_inputs"), calibration_of("initializers_as_inputs"), config)
    assert min(output.sqnr_db for output in result.report.outputs) > 20


def test_dynamic_quantization_of_an_operator_without_weights_is_an_error_that_names_it():
    net = Net()
    model = net.model(net.node("Relu", net.node("MatMul", net.input("x", (2, 4)), net.weight(4, 3)), name="relu"))
    config = get_default_config("UINT8_DYNAMIC_QUANT")
    config.extra_options["QuantizeAllOpTypes"] = True
    with pytest.raises(ModelError, match=r"'relu' \(Relu\): dynamic quantization needs"):
        quantize(model, [random_feed(model)], config)


@pytest.mark.parametrize("preset", ["INT8_CNN_DEFAULT", "XINT8_ADAROUND", "INT4_WEIGHT_ONLY", "MXFP8E4M3"])
def test_a_product_of_constants_stays_as_it_is(preset):
    """The result is an output, so that it is not folded; its first operand has more dimensions than the weight."""
    net = Net()
    z = net.node("MatMul", net.weight(1, 6, 32), net.weight(32, 8), name="of_constants")
    y = net.node("MatMul", net.node("Relu", net.input("x", (2, 32))), net.weight(32, 8))
    model = net.model(y, z)
    result = quantize(onnx.shape_inference.infer_shapes(model), [random_feed(model, seed) for seed in range(6)], preset)
    assert result.report.verdict.value == "ok"
    reasons = {each.node: each.reason for each in result.plan.skipped}
    assert reasons["of_constants"] == "computes on constants alone: ONNX Runtime does so once, when it loads the file"
