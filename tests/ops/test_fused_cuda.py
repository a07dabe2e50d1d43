"""The Triton kernels against the definitions: bit for bit against numpy and the composed operations.

They run on a CUDA device; or, where Triton is installed and TRITON_INTERPRET=1 is set, in its interpreter, slowly.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from trained_quantizers import KINDS, assert_same, composed, four_bits, odd_values, parameters_of

from quark.formats.affine import Granularity
from quark.formats.arrays import array_kind
from quark.formats.block import BlockQuantizer, quantize_dequantize_blocks
from quark.formats.catalog import BLOCK_FORMATS
from quark.formats.spec import BlockFormat, IntFormat, NonFinite, Rounding, ScaleRule, SubBlocks
from quark.ops import fake_quantize, fused_fake_quantize
from quark.ops.fused_fake_quantize import Parameters

pytest.importorskip("triton")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not torch.cuda.is_available() and not IS_INTERPRETED:
    pytest.skip("no CUDA device", allow_module_level=True)
DEVICE = "cpu" if IS_INTERPRETED else "cuda"

RULES = (ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN, ScaleRule.RCEIL)
# per tensor within one program, in several, more than one program sums up; per channel
SHAPES = [((40,), None), ((300, 17), None), ((3, 129, 257), None), ((6, 5, 7), 0), ((3, 40_000), 0), ((1, 9), 1)]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """In the interpreter, tensors of the CPU count as those of a device."""
    if IS_INTERPRETED:
        monkeypatch.setattr(fused_fake_quantize, "_on_device", lambda x: fused_fake_quantize._CURRENT_DEVICE)
        monkeypatch.setattr(fused_fake_quantize, "_backend", lambda x: fused_fake_quantize.triton_backend())


def same(actual, expected):
    assert_same(actual.detach().float().cpu(), torch.as_tensor(expected).detach().float())


# Triton's interpreter cuts bfloat16 instead of rounding it
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (not IS_INTERPRETED))
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
@pytest.mark.parametrize("name", KINDS)
def test_values_and_gradients_are_those_of_the_definition(name, shape, axis, dtype):
    parameter, zero_point = parameters_of(name, Granularity(axis).parameter_shape(shape))
    x = torch.from_numpy(odd_values(shape)).to(dtype)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    definition = composed(name, axis, zero_point)
    theirs, their_parameter = x.clone().requires_grad_(), parameter.clone().requires_grad_(name != "affine")
    expected = definition(theirs, their_parameter)
    expected.backward(gradient)

    ours, our_parameter = (
        tensor.detach().to(DEVICE).requires_grad_(tensor.requires_grad) for tensor in (theirs, their_parameter)
    )
    held = Parameters(four_bits(name), our_parameter, None if zero_point is None else zero_point.to(DEVICE))
    actual = fused_fake_quantize.fused_fake_quantize(ours, held, Granularity(axis), definition)
    assert actual is not None
    actual.backward(gradient.to(DEVICE))
    same(actual, expected.detach().float())
    same(ours.grad, theirs.grad.float())
    assert actual.dtype == ours.grad.dtype == dtype
    if name != "affine":
        torch.testing.assert_close(our_parameter.grad.cpu(), their_parameter.grad, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lsq", "tqt"])
def test_the_same_inputs_give_the_same_bits(name):
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 30_011)).astype(np.float32)).to(DEVICE)
    parameter, _ = parameters_of(name, ())
    held = Parameters(four_bits(name), parameter.to(DEVICE))
    rows = fused_fake_quantize._rows(x, Granularity())
    backend = fused_fake_quantize.triton_backend()
    first, second = (backend.gradients(x, x, held, rows)[1] for _ in range(2))
    assert torch.equal(first, second)


def numpy_blocks(x, axis, quantizer):
    return quantize_dequantize_blocks(array_kind(x), x, axis, quantizer)


@pytest.mark.parametrize("nonfinite", NonFinite)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_blocks_are_those_of_numpy(fmt, rule, nonfinite):
    if rule not in fmt.scale_rules:
        pytest.skip("the format has its own rule")
    for seed, (shape, axis) in enumerate([((5, 64), 1), ((37, 6), 0), ((2, 48, 5), 1), ((3, 7), 1), ((200,), 0)]):
        x = odd_values(shape, seed)
        for rounding in Rounding:
            quantizer = BlockQuantizer(fmt, rule, rounding, nonfinite)
            actual = fused_fake_quantize.quantize_dequantize_on_cuda(torch.from_numpy(x).to(DEVICE), axis, quantizer)
            same(actual, numpy_blocks(x, axis, quantizer))


@pytest.mark.parametrize("size", [1, 2, 7, 16, 100, 1000])
@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_blocks_of_any_size(fmt, size):
    quantizer = BlockQuantizer(fmt.with_block_size(size))
    for shape, axis in [((3, 130), 1), ((130, 3), 0)]:
        x = odd_values(shape, size)
        actual = fused_fake_quantize.quantize_dequantize_on_cuda(torch.from_numpy(x).to(DEVICE), axis, quantizer)
        same(actual, numpy_blocks(x, axis, quantizer))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_every_binade_and_every_tie(fmt):
    """Blocks with each exponent of float32 on top, and elements half way between neighbours below it."""
    exponents = np.arange(-149, 128)[:, None]
    steps = np.concatenate([np.arange(0, 16) / 8, [1.75, 1.875, 1.9375, 1.96875]])[None]
    with np.errstate(over="ignore", under="ignore"):
        x = np.ldexp(steps, exponents).astype(np.float32)
    x = np.concatenate([x, -x[:, 1:13]], 1)
    for rule in (rule for rule in RULES if rule in fmt.scale_rules):
        for rounding in Rounding:
            quantizer = BlockQuantizer(fmt, rule, rounding, NonFinite.BLOCK_NAN)
            actual = fused_fake_quantize.quantize_dequantize_on_cuda(torch.from_numpy(x).to(DEVICE), 1, quantizer)
            same(actual, numpy_blocks(x, 1, quantizer))


@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * (not IS_INTERPRETED))
def test_blocks_of_short_floats_are_computed_in_float32(dtype):
    x = torch.from_numpy(odd_values((40, 64))).to(dtype)
    for name in ("mxfp4_e2m1", "mx6", "bfp16"):
        quantizer = BlockQuantizer(next(fmt for fmt in BLOCK_FORMATS if fmt.name == name))
        expected = quantize_dequantize_blocks(array_kind(x), x, 1, quantizer)
        actual = fused_fake_quantize.quantize_dequantize_on_cuda(x.to(DEVICE), 1, quantizer)
        assert actual.dtype == dtype
        same(actual, expected.float())


def test_what_the_kernel_does_not_take_is_declined():
    x = torch.zeros(4, 64, device=DEVICE)
    mxfp4 = BLOCK_FORMATS[4]
    odd = replace(mxfp4, element=IntFormat("int5sym", 5, True, 3, True), sub_blocks=SubBlocks(3, 1))
    assert isinstance(odd, BlockFormat)
    for declined in (BlockQuantizer(mxfp4, ScaleRule.MSE), BlockQuantizer(odd)):
        assert fused_fake_quantize.quantize_dequantize_on_cuda(x, 1, declined) is None
    assert fused_fake_quantize.quantize_dequantize_on_cuda(x.double(), 1, BlockQuantizer(mxfp4)) is None


@pytest.mark.skipif(IS_INTERPRETED, reason="torch sees no device")
def test_the_public_functions_take_the_kernels(monkeypatch):
    launched = []
    backend = fused_fake_quantize.triton_backend()

    def counted(x):
        launched.append("steps")
        return backend

    monkeypatch.setattr(fused_fake_quantize, "_backend", counted)
    x = torch.from_numpy(odd_values((64, 64))).to(DEVICE).requires_grad_()
    step = torch.tensor(0.3, device=DEVICE, requires_grad=True)
    fake_quantize.lsq(x, step, 4)
    fake_quantize.tqt(x, step, 4)
    assert launched == ["steps"] * 2
    values = fake_quantize.block_fake_quantize(x, "mxfp4_e2m1", 1, scale_rule="even")
    same(values, numpy_blocks(x.detach().cpu().numpy(), 1, BlockQuantizer(BLOCK_FORMATS[4], ScaleRule.EVEN)))
