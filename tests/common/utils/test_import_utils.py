"""The path that scripts import `export_for_training` from."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quark.common.utils.import_utils import export_for_training


def test_the_batch_stays_dynamic_unless_shapes_are_given() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    exported = export_for_training(model, (torch.rand(1, 4),)).module()
    assert exported(torch.rand(5, 4)).shape == (5, 3)
    fixed = export_for_training(model, (torch.rand(2, 4),), dynamic_shapes=({0: None},)).module()
    with pytest.raises((RuntimeError, AssertionError)):
        fixed(torch.rand(5, 4))
