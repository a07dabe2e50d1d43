"""Decorators and checks for test suites that were written against AMD Quark, under the names that they import.

Slow tests run if the environment variable QUARK_TEST_WITH_SLOW is 1, and tests for a developer's own machine if
QUARK_EXTENSIVE_TEST is; with QUARK_TEST_SKIP_FAST, a `TestCase` runs its slow tests only.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from quark.common.utils.import_utils import is_accelerate_available, is_torch_available, is_vllm_available
from quark.common.utils.torch_utils import is_torch_higher_or_equal, is_torch_lower_or_equal
from quark.errors import InvalidValueError

Test = Callable[..., Any]


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0").lower() in ("1", "true", "yes", "on")


def use_temporary_directory(function: Test) -> Test:
    """Call a test with the keyword argument `tmpdir`, a folder that is removed afterwards."""

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        options.pop("tmpdir", None)  # pytest has a fixture of that name
        with tempfile.TemporaryDirectory() as folder:
            return function(*args, **options, tmpdir=folder)

    return wrapper


def delete_directory_content(directory: str) -> None:
    """Remove everything in a folder, and keep the folder."""
    if not os.path.isdir(directory):
        raise InvalidValueError(f"'{directory}' is not a folder")
    for entry in Path(directory).iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@contextmanager
def set_environment_variables(**variables: str | None) -> Iterator[None]:
    """Set environment variables for a while; None unsets one."""

    def put(values: dict[str, str | None]) -> None:
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    before = {name: os.environ.get(name) for name in variables}
    put(variables)
    try:
        yield
    finally:
        put(before)


def with_env(**variables: str | None) -> Callable[[Test], Test]:
    """`set_environment_variables` as a decorator."""

    def decorator(function: Test) -> Test:
        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            with set_environment_variables(**variables):
                return function(*args, **options)

        return wrapper

    return decorator


def retry_flaky_test(max_attempts: int = 5) -> Callable[[Test], Test]:
    """Run a test again when it fails, up to this many times in all; the last failure counts."""

    def decorator(function: Test) -> Test:
        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            for attempt in range(1, max_attempts + 1):
                try:
                    return function(*args, **options)
                except Exception as error:  # noqa: PERF203 - a test takes longer than that
                    if isinstance(error, unittest.SkipTest) or attempt == max_attempts:
                        raise
            raise InvalidValueError(f"max_attempts {max_attempts}: expected at least 1")

        return wrapper

    return decorator


def _skipped_unless(is_wanted: Callable[[], bool], reason: str) -> Callable[[Test], Test]:
    """A decorator that asks when the test runs, so that a test file imports neither torch nor anything else for it."""

    def decorator(function: Test) -> Test:
        @functools.wraps(function)
        def wrapper(*args: Any, **options: Any) -> Any:
            if not is_wanted():
                raise unittest.SkipTest(reason)
            return function(*args, **options)

        return wrapper

    return decorator


def slow_test(function: Test) -> Test:
    """Skip a test unless QUARK_TEST_WITH_SLOW is 1. The outermost decorator of a test."""
    wrapper = _skipped_unless(lambda: _is_set("QUARK_TEST_WITH_SLOW"), "slow: set QUARK_TEST_WITH_SLOW=1")(function)
    wrapper.__dict__["slow_test"] = True
    return wrapper


def slow_test_if(condition: bool) -> Callable[[Test], Test]:
    """`slow_test` where the condition holds."""
    return slow_test if condition else lambda function: function


def _gpus() -> int:
    if not is_torch_available():
        return 0
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _has_gpu() -> bool:
    return _gpus() > 0


def _is_rocm() -> bool:
    import torch

    return torch.version.hip is not None


def require_torch_higher_or_equal(min_version: str) -> Callable[[Test], Test]:
    """Skip a test with an older torch."""
    return _skipped_unless(lambda: is_torch_higher_or_equal(min_version), f"needs torch {min_version} or newer")


def require_torch_lower_or_equal(max_version: str) -> Callable[[Test], Test]:
    """Skip a test with a newer torch."""
    return _skipped_unless(lambda: is_torch_lower_or_equal(max_version), f"needs torch {max_version} or older")


local_test_only = _skipped_unless(lambda: _is_set("QUARK_EXTENSIVE_TEST"), "set QUARK_EXTENSIVE_TEST=1 to run it")
skip_if_no_gpu = _skipped_unless(_has_gpu, "needs a GPU")
require_torch_cuda = skip_if_no_gpu
require_linux = _skipped_unless(lambda: sys.platform.startswith("linux"), "needs Linux")
require_accelerate = _skipped_unless(is_accelerate_available, "needs the package accelerate")
require_vllm = _skipped_unless(is_vllm_available, "needs the package vllm")
require_torch_multi_gpu = _skipped_unless(lambda: _gpus() > 1, "needs several GPUs")
require_torch_hip = _skipped_unless(lambda: _gpus() > 0 and _is_rocm(), "needs torch for ROCm and a GPU")


def skip_torch_version(skip_version: str) -> Callable[[Test], Test]:
    """Skip a test with exactly this torch."""

    def is_another() -> bool:
        return not (is_torch_higher_or_equal(skip_version) and is_torch_lower_or_equal(skip_version))

    return _skipped_unless(is_another, f"skipped with torch {skip_version}")


def __getattr__(name: str) -> Any:
    """`torch_device`, where tests run: that of the environment variable QUARK_TEST_DEVICE, or a GPU if there is one.
    It is found when it is asked for, so that other names do not import torch."""
    if name != "torch_device":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not is_torch_available():
        return None
    import torch

    return torch.device(os.environ.get("QUARK_TEST_DEVICE") or ("cuda" if _has_gpu() else "cpu"))


class TestCase(unittest.TestCase):
    """A test case that leaves out fast tests if QUARK_TEST_SKIP_FAST is 1."""

    def setUp(self) -> None:
        test = getattr(self, self._testMethodName)
        if _is_set("QUARK_TEST_SKIP_FAST") and not getattr(test, "slow_test", False):
            self.skipTest("fast, and QUARK_TEST_SKIP_FAST is set")


def assert_outputs_equivalent(
    a: Any, b: Any, *, atol: float | None = None, rtol: float | None = None, ctx: str = ""
) -> None:
    """Compare arrays, torch tensors or numbers, also in lists and tuples, with numpy's tolerances unless given."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        assert len(a) == len(b), f"{len(a)} outputs and {len(b)} {ctx}"
        for index, (first, second) in enumerate(zip(a, b, strict=True)):
            assert_outputs_equivalent(first, second, atol=atol, rtol=rtol, ctx=f"{ctx}[{index}]")
        return
    first, second = (value.detach().cpu().float().numpy() if hasattr(value, "detach") else value for value in (a, b))
    usual_atol, usual_rtol = (0.0 if atol is None else atol), (1e-7 if rtol is None else rtol)
    np.testing.assert_allclose(np.asarray(first), np.asarray(second), usual_rtol, usual_atol, err_msg=ctx)


def run_op_variants(
    pipeline_fn: Callable[[], Any],
    *,
    legacy_ctx: AbstractContextManager[None] | None = None,
    stable_ctx: AbstractContextManager[None] | None = None,
    seed: int = 42,
) -> Any:
    """Run a function under each context that is given, or once by itself, with the same seed each time, and return what
    it returns. The results must be equal to the last bit."""
    results = []
    for context in [ctx for ctx in (stable_ctx, legacy_ctx) if ctx is not None] or [nullcontext()]:
        with context:
            random.seed(seed)
            np.random.seed(seed)
            if "torch" in sys.modules:
                sys.modules["torch"].manual_seed(seed)
            results.append(pipeline_fn())
    for other in results[1:]:
        assert_outputs_equivalent(results[0], other, atol=0, rtol=0, ctx="two variants")
    return results[0]
