"""The formats on a GPU give the bits that they give on a CPU. Skipped where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from golden import cases, quantizer, quantizer_names, same

from quark.formats import FORMATS, quantize_dequantize
from quark.formats.arrays import array_kind
from quark.formats.block import quantize_dequantize_blocks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

COMMON = [name for name in FORMATS if name.strip("uint") not in map(str, range(9, 32))]


@pytest.mark.parametrize("name", quantizer_names())
def test_golden_values(name: str) -> None:
    for case in cases(name):
        tensor = torch.from_numpy(case.x).cuda()
        axis = case.axis % max(1, case.x.ndim)
        actual = quantize_dequantize_blocks(array_kind(tensor), tensor, axis, quantizer(name))
        assert not case.mismatches(actual.cpu().numpy()).any(), case.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", COMMON)
def test_same_bits_as_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(7, 100, generator=generator) * 2.0 ** torch.randint(-20, 14, (7, 100), generator=generator)).to(
        dtype
    )
    for axis in (0, 1):
        on_gpu = quantize_dequantize(x.cuda(), name, axis)
        assert on_gpu.device.type == "cuda"
        assert on_gpu.dtype == dtype
        expected = quantize_dequantize(x, name, axis)
        assert same(on_gpu.double().cpu().numpy(), expected.double().numpy()).all()


@pytest.mark.parametrize("rule", ["floor", "ceil", "even", "rceil", "mse"])
def test_random_bits(rule: str) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, (64, 512), dtype=np.uint64).astype(np.uint32)
    x = torch.from_numpy(bits.view(np.float32))
    for name in ("mxfp8_e4m3", "mxfp4_e2m1", "mxint8", "mx9", "bfp16"):
        for policy in ("block_nan", "passthrough"):
            on_gpu = quantize_dequantize(x.cuda(), name, 1, scale_rule=rule, nonfinite=policy).cpu().numpy()
            assert same(on_gpu, quantize_dequantize(x, name, 1, scale_rule=rule, nonfinite=policy).numpy()).all()
