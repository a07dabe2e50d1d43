"""Quantizers to train through: golden gradients, and gradients re-derived by autograd from straight-through pieces."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from quark.errors import InvalidValueError, UnsupportedTypeError
from quark.formats.affine import (
    AffineParameters,
    choose_affine,
    find_ranges,
    integer_format,
    quantize_dequantize_affine,
)
from quark.formats.quantize import quantize_dequantize
from quark.ops.fake_quantize import affine_fake_quantize, block_fake_quantize, code_limits, lsq, lsq_initial_scale, tqt

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "golden.npz")
GRADS = json.loads(bytes(GOLDEN["meta_json"]))["grads"]
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
LEARNED = {"lsq": (lsq, 0.37), "tqt": (tqt, 0.6)}


def golden(name):
    return torch.from_numpy(GOLDEN[name])


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run(function, x, parameter, gradient):
    """(values, gradient of x, gradient of the parameter)"""
    x, parameter = x.clone().requires_grad_(), parameter.clone().requires_grad_()
    values = function(x, parameter)
    values.backward(gradient)
    return values.detach(), x.grad, parameter.grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(len(GRADS["lsq"])))
def test_lsq_golden(index, device):
    case = GRADS["lsq"][index]
    v, gradient = golden(f"lsq{index}__v").to(device), golden(f"lsq{index}__gy").to(device)
    step = torch.tensor(case["s"], dtype=torch.float64, device=device)
    values, grad_v, grad_s = run(lambda v, s: lsq(v, s, case["bits"], case["signed"]), v, step, gradient)
    assert torch.equal(values.cpu(), golden(f"lsq{index}__y"))
    assert torch.equal(grad_v.cpu(), golden(f"lsq{index}__gv"))
    assert grad_s.item() == pytest.approx(case["grad_s"], rel=1e-12, abs=1e-14)
    assert lsq_initial_scale(v, case["bits"], case["signed"]).item() > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", range(len(GRADS["tqt"])))
def test_tqt_golden(index, device):
    case = GRADS["tqt"][index]
    x, gradient = golden(f"tqt{index}__x").to(device), golden(f"tqt{index}__gy").to(device)
    threshold = torch.tensor(case["log2t"], dtype=torch.float64, device=device)
    values, grad_x, grad_t = run(lambda x, t: tqt(x, t, case["bits"], case["signed"]), x, threshold, gradient)
    assert torch.equal(values.cpu(), golden(f"tqt{index}__y"))
    assert torch.equal(grad_x.cpu(), golden(f"tqt{index}__gx"))
    assert grad_t.item() == pytest.approx(case["grad_log2t"], rel=1e-12, abs=1e-14)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, function):
        return function(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def straight_through(function, x):
    return _StraightThrough.apply(x, function)


def lsq_by_autograd(v, s, bits, signed):
    lowest, highest = code_limits(bits, signed)
    scaled = s / math.sqrt(v.numel() * highest)
    step = s.detach() + scaled - scaled.detach()  # the factor g on the gradient alone
    return straight_through(torch.round, (v / step).clamp(lowest, highest)) * step


def tqt_by_autograd(x, log2_threshold, bits, signed):
    lowest, highest = code_limits(bits, signed)
    step = torch.exp2(straight_through(torch.ceil, log2_threshold)) / (highest + 1)
    return straight_through(torch.round, x / step).clamp(lowest, highest) * step


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_are_those_of_straight_through_rounding(name, bits, signed):
    function, value = LEARNED[name]
    derived = {"lsq": lsq_by_autograd, "tqt": tqt_by_autograd}[name]
    x, gradient = 2 * normal(500), normal(500, seed=1)
    parameter = torch.tensor(value, dtype=torch.float64)
    ours = run(lambda x, p: function(x, p, bits, signed), x, parameter, gradient)
    theirs = run(lambda x, p: derived(x, p, bits, signed), x, parameter, gradient)
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def test_the_threshold_gradient_is_that_of_the_saturated_values():
    # where all values saturate, x_hat = p * s: halving and doubling s straddles the slope in log2 t
    x = torch.full((4,), 100.0, dtype=torch.float64)
    _, _, grad = run(lambda x, t: tqt(x, t, 4), x, torch.tensor(0.0, dtype=torch.float64), torch.ones_like(x))
    assert grad.item() == pytest.approx(4 * 7 / 8 * math.log(2))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", LEARNED)
def test_a_channel_is_treated_as_a_tensor_of_its_own(name, axis):
    function, value = LEARNED[name]
    x, gradient = normal(3, 4, 5), normal(3, 4, 5, seed=2)
    channels = x.shape[axis]
    parameter = value * (1 + torch.arange(channels, dtype=torch.float64))
    whole = run(lambda x, p: function(x, p, 3, True, axis), x, parameter, gradient)
    for c in range(channels):
        alone = run(lambda x, p: function(x, p, 3), x.select(axis, c), parameter[c], gradient.select(axis, c))
        torch.testing.assert_close(whole[0].select(axis, c), alone[0], rtol=0, atol=0)
        torch.testing.assert_close(whole[1].select(axis, c), alone[1], rtol=0, atol=0)
        torch.testing.assert_close(whole[2][c], alone[2])


def test_lsq_starts_from_the_mean_magnitude():
    v = normal(6, 10)
    assert lsq_initial_scale(v, 8).item() == pytest.approx(2 * v.abs().mean().item() / math.sqrt(127))
    assert lsq_initial_scale(v, 4, signed=False).item() == pytest.approx(2 * v.abs().mean().item() / math.sqrt(15))
    torch.testing.assert_close(lsq_initial_scale(v, 8, axis=-1), 2 * v.abs().mean(0) / math.sqrt(127))
    assert lsq_initial_scale(torch.zeros(3)).item() > 0


@pytest.mark.parametrize("step", [0.0, -1.0, 1e-45])
def test_lsq_survives_a_step_that_is_not_positive(step):
    x = torch.tensor([0.0, 1.0, -1.0])
    values, _, grad = run(lambda v, s: lsq(v, s, 8), x, torch.tensor(step), torch.ones(3))
    assert values.isfinite().all()
    assert grad.item() == pytest.approx((127 - 128) / math.sqrt(3 * 127))


@pytest.mark.parametrize(("exponent", "step"), [(-300.0, 2.0**-126), (300.0, 2.0**126)])
def test_tqt_confines_its_step(exponent, step):
    values = tqt(torch.tensor([step]), torch.tensor(exponent), 8)
    assert values.item() == step


@pytest.mark.parametrize("name", LEARNED)
def test_not_a_number_shows_and_has_no_gradient(name):
    function, value = LEARNED[name]
    x = torch.tensor([float("nan"), 0.2, float("inf")])
    values, grad_x, grad_p = run(lambda x, p: function(x, p, 8), x, torch.tensor(value), torch.ones(3))
    assert values.isnan().tolist() == [True, False, False]
    assert grad_x.tolist() == [0.0, 1.0, 0.0]
    assert grad_p.isfinite()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["mxfp4_e2m1", "mxint8", "mx6", "bfp16", "fp8_e4m3", "int8"])
def test_blocks_pass_the_gradient_straight_through(name, dtype, device):
    x = normal(6, 40, dtype=dtype).to(device).requires_grad_()
    gradient = normal(6, 40, seed=1, dtype=dtype).to(device)
    values = block_fake_quantize(x, name, 0, rounding="half_away")
    values.backward(gradient)
    assert torch.equal(values, quantize_dequantize(x.detach(), name, 0, rounding="half_away"))
    assert torch.equal(x.grad, gradient)


def affine_parameters(x, name, axis=None):
    fmt = integer_format(name)
    return AffineParameters(*choose_affine(*find_ranges(x, axis), fmt), fmt, axis)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "uint16"])
def test_affine_values_and_gradients_are_those_of_torch(name, device):
    parameters = affine_parameters(normal(500, dtype=torch.float32).to(device), name)
    gradient = normal(2000, seed=1, dtype=torch.float32).to(device)
    ours, theirs = ((2 * normal(2000, seed=3, dtype=torch.float32)).to(device).requires_grad_() for _ in range(2))
    values = affine_fake_quantize(ours, parameters)
    values.backward(gradient)
    fmt = parameters.format
    peer = torch.fake_quantize_per_tensor_affine(
        theirs, parameters.scale, parameters.zero_point.to(torch.int32), fmt.qmin, fmt.qmax
    )
    peer.backward(gradient)
    assert torch.equal(values, quantize_dequantize_affine(ours.detach(), parameters))
    # torch multiplies by 1 / scale, which moves a few values across a tie
    assert (values == peer).float().mean() > 0.99
    assert (ours.grad == theirs.grad).float().mean() > 0.999
    assert 0 < (ours.grad == 0).float().mean() < 1


def test_affine_channels():
    x = normal(3, 50, dtype=torch.float32)
    parameters = affine_parameters(0.5 * x, "int8", axis=0)
    y = (x.clone()).requires_grad_()
    affine_fake_quantize(y, parameters).sum().backward()
    rounded = torch.round(x / parameters.scale[:, None]) + parameters.zero_point[:, None]
    assert torch.equal(y.grad, ((rounded >= -128) & (rounded <= 127)).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LEARNED)
def test_short_floats_are_computed_in_float32(name, dtype):
    function, value = LEARNED[name]
    x, gradient = normal(300, dtype=dtype), normal(300, seed=1, dtype=dtype)
    parameter = torch.tensor(value)
    short = run(lambda x, p: function(x, p, 4), x, parameter, gradient)
    wide = run(lambda x, p: function(x, p, 4), x.float(), parameter, gradient.float())
    assert [t.dtype for t in short] == [dtype, dtype, torch.float32]
    assert torch.equal(short[0], wide[0].to(dtype))
    assert torch.equal(short[1], wide[1].to(dtype))
    torch.testing.assert_close(short[2], wide[2])


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_of_training_under_autocast(device):
    torch.manual_seed(0)
    layer = torch.nn.Linear(32, 8).to(device)
    step = torch.nn.Parameter(lsq_initial_scale(layer.weight, 4, axis=0))
    threshold = torch.nn.Parameter(torch.zeros((), device=device))
    x = torch.randn(16, 32, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        hidden = torch.nn.functional.linear(tqt(x, threshold, 8), lsq(layer.weight, step, 4, axis=0), layer.bias)
        loss = block_fake_quantize(hidden, "mxfp8_e4m3").square().mean()
    assert hidden.dtype == torch.bfloat16
    loss.backward()
    for parameter in (layer.weight, step, threshold):
        assert parameter.grad.dtype == parameter.dtype
        assert parameter.grad.isfinite().all()
        assert parameter.grad.abs().sum() > 0


PARAMETERS = affine_parameters(normal(4, 32, dtype=torch.float32), "int4", axis=0)
COMPILED = {
    "lsq": lambda x, p: lsq(x, p, 4, True, 0),
    "tqt": lambda x, p: tqt(x, p, 4, True, 0),
    "mxfp6_e2m3": lambda x, p: block_fake_quantize(x, "mxfp6_e2m3") * p[:, None],
    "mx9": lambda x, p: block_fake_quantize(x, "mx9") * p[:, None],
    "fp8_e4m3": lambda x, p: block_fake_quantize(x, "fp8_e4m3") * p[:, None],
    "affine": lambda x, p: affine_fake_quantize(x, PARAMETERS) * p[:, None],
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_into_one_graph(name):
    torch._dynamo.reset()
    compiled = torch.compile(COMPILED[name], fullgraph=True, backend="aot_eager")
    x, gradient = normal(4, 32, dtype=torch.float32), normal(4, 32, seed=1, dtype=torch.float32)
    parameter = torch.tensor([0.1, 0.2, 0.3, 0.4])
    eager, graph = (run(f, x, parameter, gradient) for f in (COMPILED[name], compiled))
    assert torch.equal(graph[0], eager[0])
    assert torch.equal(graph[1], eager[1])
    torch.testing.assert_close(graph[2], eager[2])


def test_what_is_refused_says_why():
    x = torch.zeros(3, 4)
    with pytest.raises(InvalidValueError, match="bits 1: expected 2 to 32"):
        lsq(x, torch.ones(()), 1)
    with pytest.raises(InvalidValueError, match="without axis"):
        tqt(x, torch.ones(3), 8)
    with pytest.raises(InvalidValueError, match=r"expected \(4,\)"):
        lsq(x, torch.ones(3), 8, axis=1)
    with pytest.raises(UnsupportedTypeError, match="int64"):
        lsq(x.long(), torch.ones(()), 8)


def test_without_torch_the_error_says_what_to_install():
    program = "import sys; sys.modules['torch'] = None; import quark.ops.fake_quantize"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "MissingDependencyError" in result.stderr
    assert "pip install torch" in result.stderr


def test_the_package_itself_does_not_load_torch():
    program = "import sys, quark.ops, quark.formats.affine, quark.formats.packing; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
