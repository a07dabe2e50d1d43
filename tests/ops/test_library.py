"""The path of the operator library, by device."""

from __future__ import annotations

import sys
import warnings

import pytest

from quark.errors import QuarkError
from quark.ops.library import get_library_path


@pytest.mark.parametrize("device", ["CPU", "cpu"] + ["CUDA"] * (sys.platform != "darwin"))
def test_one_library_for_every_device_with_kernels(device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_library_path(device) == get_library_path()


def test_a_device_without_kernels_is_told() -> None:
    with pytest.warns(UserWarning, match="none for ROCM: its operators will run on the CPU"):
        assert get_library_path("ROCM") == get_library_path()


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(QuarkError, match="TPU"):
        get_library_path("TPU")
