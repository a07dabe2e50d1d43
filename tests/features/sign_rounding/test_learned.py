"""Weights whose rounding is learned."""

from __future__ import annotations

import pytest
import torch

from quark.features.sign_rounding.learned import learned_weight
from quark.torch.language.linear import round_to_nearest
from quark.torch.quantization.config.config import (
    Int4PerChannelSpec,
    Int4PerTensorSpec,
    OCP_MXFP4Spec,
    Uint4PerGroupSpec,
)

SPECS = [Int4PerTensorSpec(), Int4PerChannelSpec(0), Uint4PerGroupSpec(-1, 32), OCP_MXFP4Spec()]


@pytest.mark.parametrize("named", SPECS)
def test_it_starts_as_rounding_to_nearest_and_offsets_move_by_at_most_one_step(named) -> None:
    spec = named.to_quantization_spec().tensor_spec()
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    learned = learned_weight(weight, spec, has_clipping=True)
    nearest = round_to_nearest(weight, spec).values
    torch.testing.assert_close(learned.result().values, nearest)
    with torch.no_grad():
        learned.offsets.fill_(9.0)
    learned.limit()
    moved = learned.result().values
    assert (moved >= nearest - 1e-6).all()
    assert (moved > nearest).any()


def test_clipped_ranges_give_finer_scales_with_the_same_codes_as_the_result() -> None:
    spec = Uint4PerGroupSpec(-1, 32).to_quantization_spec().tensor_spec()
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    learned = learned_weight(weight, spec, has_clipping=True)
    before = learned.result().parameters.scale
    with torch.no_grad():
        for clip in learned.clips:
            clip.fill_(0.75)
    found = learned.result()
    assert (found.parameters.scale < 0.76 * before).all()
    codes = found.values / torch.from_numpy(found.parameters.scale).repeat_interleave(32, 1)
    torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)
