"""Quantizers to train through in one pass: the numbers of the composed operations, and less is asked of memory."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from trained_quantizers import KINDS, assert_same, composed, four_bits, odd_values, parameters_of

from quark.formats.affine import AffineParameters, Granularity, integer_format
from quark.formats.native import native_fake_quantize
from quark.formats.quantize import quantize_dequantize
from quark.ops.fake_quantize import affine_fake_quantize, block_fake_quantize, lsq, tqt
from quark.ops.fused_fake_quantize import Parameters, fused_fake_quantize

pytestmark = pytest.mark.skipif(native_fake_quantize() is None, reason="the compiled code is switched off")

# (shape, axis): within a vector, with a rest, several pieces; first, middle and last axis; nothing at all
LAYOUTS = [
    *[((), None), ((5,), None), ((33, 17), None), ((3, 129, 257), None), ((0, 4), None)],
    *[((6, 5, 7), 0), ((3, 40_000), 0), ((2, 3, 5, 7), 1), ((4, 6), -1), ((0, 3), 1), ((3, 0), 0)],
]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def both_ways(name, x, granularity, gradient, parameter_dtype=torch.float32):
    """(values, gradient of x, gradient of the parameter) by compiled code, and by the definition."""
    shape = granularity.parameter_shape(tuple(x.shape))
    parameter, zero_point = parameters_of(name, shape)
    definition = composed(name, granularity.axis, zero_point, granularity.group_size)
    found = []
    for is_fused in (True, False):
        p = parameter.to(parameter_dtype, copy=True).requires_grad_(name != "affine")
        source = x.detach().requires_grad_()
        if is_fused:
            values = fused_fake_quantize(source, Parameters(four_bits(name), p, zero_point), granularity, definition)
            assert values is not None
        else:
            values = definition(source, p)
        values.backward(gradient)
        found.append((values.detach(), source.grad, p.grad))
    return found


def compare(name, fused, defined):
    assert_same(fused[0], defined[0])
    assert_same(fused[1], defined[1])
    if name != "affine":
        assert fused[2].shape == defined[2].shape
        torch.testing.assert_close(fused[2], defined[2], rtol=3e-5, atol=1e-5)


def noise(shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("shape", "axis"), LAYOUTS)
@pytest.mark.parametrize("name", KINDS)
def test_values_and_gradients_are_those_of_the_definition(name, shape, axis, threads):
    x = torch.from_numpy(odd_values(shape))
    compare(name, *both_ways(name, x, Granularity(axis), noise(shape)))


@pytest.mark.parametrize("name", KINDS)
def test_tensors_in_any_order_of_memory(name):
    image = torch.from_numpy(odd_values((3, 5, 4, 6)))
    views = [
        image.to(memory_format=torch.channels_last),
        image[:1].to(memory_format=torch.channels_last),
        image.transpose(1, 3),
        image[:, 1:4, ::2],
        image[:1].expand(4, -1, -1, -1),
    ]
    for x in views:
        for axis in (None, 0, 1, -1):
            compare(name, *both_ways(name, x, Granularity(axis), noise(x.shape)))
            one = torch.ones(()).expand(x.shape)  # what a sum gives back
            compare(name, *both_ways(name, x, Granularity(axis), one))


@pytest.mark.parametrize("name", KINDS)
def test_channels_last_stays_and_is_not_copied(name):
    x = noise((2, 8, 5, 5)).to(memory_format=torch.channels_last)
    (values, gradient, _), _ = both_ways(name, x, Granularity(), noise(x.shape))
    assert values.stride() == gradient.stride() == x.stride()


def test_groups_along_the_last_axis():
    x = torch.from_numpy(odd_values((6, 32)))
    compare("affine", *both_ways("affine", x, Granularity(1, 8), noise(x.shape)))
    fmt = integer_format("int4")
    parameter, zero_point = parameters_of("affine", (6, 5))
    y = torch.zeros(6, 33)
    held = Parameters(four_bits("affine"), *parameters_of("affine", (6, 5)))
    assert fused_fake_quantize(y, held, Granularity(1, 8), composed("affine", 1, zero_point, 8)) is None
    assert affine_fake_quantize(y, AffineParameters(parameter, zero_point, fmt, 1, 8)).shape == y.shape


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("name", ["lsq", "tqt"])
def test_the_gradient_has_the_type_of_the_parameter(name, dtype):
    fused, defined = both_ways(name, noise((50,), 3), Granularity(), noise((50,)), dtype)
    assert fused[2].dtype == dtype
    torch.testing.assert_close(fused[2], defined[2], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(fused[0], defined[0])


@pytest.mark.parametrize("name", ["lsq", "tqt"])
def test_the_parameter_gradient_does_not_depend_on_threads(name):
    x, gradient = noise((3, 70_001), 2), noise((3, 70_001))
    found = []
    before = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(both_ways(name, x, Granularity(), gradient)[0][2])
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_the_parameter_gradient_is_summed_in_double():
    """A large term in front, and many small ones that a sum in float32 would lose one by one."""
    x = torch.full((1 << 16,), 1e6)  # all of it saturates
    gradient = torch.full_like(x, 2.0**-20)
    gradient[0] = 2.0**10
    threshold = torch.tensor(0.0, requires_grad=True)
    tqt(x, threshold, 8).backward(gradient)
    exact = gradient.double().sum().item() * 127 / 128 * math.log(2)
    assert threshold.grad.item() == pytest.approx(exact, rel=1e-7)


def test_second_derivatives_are_those_of_the_composed_operations():
    x = noise((40,), 5).requires_grad_()
    for function in (lambda v, s: lsq(v, s, 4), lambda v, s: tqt(v, s, 4)):
        for source in (x, x.detach().double().requires_grad_()):  # compiled, and composed
            step = torch.tensor(0.3, dtype=source.dtype, requires_grad=True)
            weight = torch.linspace(0, 1, 40, dtype=source.dtype, requires_grad=True)
            loss = (function(source, step) * weight).sum()
            for_x, for_step = torch.autograd.grad(loss, (source, step), create_graph=True)
            (found,) = torch.autograd.grad((for_x * noise((40,)).to(source.dtype)).sum() + for_step, weight)
            assert found.abs().sum() > 0
            if source is x:
                compiled = found
        torch.testing.assert_close(compiled.double(), found, rtol=1e-5, atol=1e-6)


def test_checkpoints_give_the_same_gradients():
    found = []
    for run in (lambda *a: torch.utils.checkpoint.checkpoint(*a, use_reentrant=False), lambda f, *a: f(*a)):
        x, step = noise((6, 10), 6).requires_grad_(), torch.tensor(0.3, requires_grad=True)
        run(lambda v, s: lsq(2 * v, s, 4) * noise((10,)), x, step).sum().backward()
        found.append((x.grad, step.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_changed_input_is_noticed_in_the_backward_pass():
    x = noise((20,)).requires_grad_()
    y = x * 1
    values = lsq(y, torch.tensor(0.3, requires_grad=True), 4)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        values.sum().backward()


@pytest.mark.parametrize("name", ["mxfp4_e2m1", "mx6", "bfp16"])
@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1])
def test_blocks_keep_the_order_of_memory(name, axis):
    x = torch.from_numpy(odd_values((4, 40, 3, 5)))
    last = x.to(memory_format=torch.channels_last).requires_grad_()
    values = block_fake_quantize(last, name, axis)
    assert_same(values, quantize_dequantize(x, name, axis))
    assert values.stride() == last.stride()
    values.backward(x)
    assert_same(last.grad, x)


def test_a_forked_process_can_quantize():
    """Its OpenMP team is gone with the parent; alone, as in the workers of a data loader, it must not wait for one."""
    program = """
import os, torch
from quark.ops.fake_quantize import lsq
x, s = torch.randn(1 << 20), torch.tensor(0.1)
torch.set_num_threads(2)
expected = lsq(x, s)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.equal(lsq(x, s), expected) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
