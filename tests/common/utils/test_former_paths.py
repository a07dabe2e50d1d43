"""Paths of earlier versions of AMD Quark lead to the same modules."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


def test_shares_is_common() -> None:
    import quark.shares.utils.log as former
    from quark.shares.utils.import_utils import is_torch_available
    from quark.shares.utils.testing_utils import torch_device, use_temporary_directory
    from quark.testing.common_utils import TestCase

    from quark.common.utils import import_utils, log, testing_utils
    from quark.testing import slow_test

    assert former is log
    assert is_torch_available is import_utils.is_torch_available
    assert use_temporary_directory is testing_utils.use_temporary_directory
    assert (slow_test, TestCase) == (testing_utils.slow_test, testing_utils.TestCase)
    assert torch_device.type in ("cpu", "cuda")


def test_former_paths_import_no_torch() -> None:
    code = "import sys, quark.shares.utils.log, quark.shares.utils.testing_utils; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_packages_are_asked_for() -> None:
    utils = importlib.import_module("quark.common.utils.import_utils")
    assert utils.is_torch_available()
    assert utils.is_torch_greater_or_equal_2_5()
    assert utils.is_package_lower_or_equal("torch", "99")
    assert not utils.is_package_lower_or_equal("no-such-package", "99")
    assert not utils.is_gguf_available_and_minimum_version("99")
    assert not utils.is_transformers_version_lower("1.0")


def test_the_kernels_need_no_step() -> None:
    pytest.importorskip("torch")
    import quark.torch.kernel  # noqa: F401
