"""Paths of earlier versions of AMD Quark lead to the same modules."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


def test_shares_is_common() -> None:
    from quark.common.utils import import_utils, log, testing_utils
    from quark.testing import slow_test

    assert importlib.import_module("quark.shares.utils.log") is log
    assert importlib.import_module("quark.shares.utils.import_utils") is import_utils
    assert importlib.import_module("quark.shares.utils.testing_utils") is testing_utils
    assert importlib.import_module("quark.testing.common_utils") is testing_utils
    assert slow_test is testing_utils.slow_test
    assert testing_utils.torch_device.type in ("cpu", "cuda")


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
