"""What the compiled quantizers to train through are given, on every device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from quark.formats.native_fake_quantize import FakeQuantizer


class Parameters(NamedTuple):
    """A quantizer with its numbers: one for each channel, on the device of the data, contiguous."""

    quantizer: FakeQuantizer
    parameter: torch.Tensor
    zero_point: torch.Tensor | None = None
