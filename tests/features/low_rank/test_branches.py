"""Low-rank branches."""

from __future__ import annotations

import numpy as np
import pytest

from quark.features.low_rank.branches import branch, branch_scales


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_the_branch_is_the_best_approximation_of_its_rank_after_smoothing(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    weight, scales = rng.standard_normal(shape), rng.random(shape[1]) + 0.5
    down, up = branch(weight, scales, 3)
    assert (down.shape, up.shape) == ((3, shape[1]), (shape[0], 3))
    left, sizes, right = np.linalg.svd(weight * scales, full_matrices=False)
    assert np.allclose(up @ down * scales, (left[:, :3] * sizes[:3]) @ right[:3])
    whole = branch(weight, scales, 99)
    assert np.allclose(whole[1] @ whole[0], weight)


def test_scales_follow_inputs_and_weights() -> None:
    weight = np.array([[1.0, -4.0], [0.5, 2.0]])
    assert np.allclose(branch_scales(np.array([9.0, 16.0]), weight, 0.5), [3.0, 2.0])
    assert np.allclose(branch_scales(np.array([9.0, 16.0]), weight, 1.0), [9.0, 16.0])
