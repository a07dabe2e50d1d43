"""The helpers of other people's test suites."""

from __future__ import annotations

import os
import unittest
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from quark.common.utils.testing_utils import (
    TestCase,
    assert_outputs_equivalent,
    delete_directory_content,
    retry_flaky_test,
    run_op_variants,
    slow_test,
    slow_test_if,
    use_temporary_directory,
    with_env,
)
from quark.errors import InvalidValueError


def test_a_temporary_directory_is_there_for_the_test_and_gone_after_it():
    @use_temporary_directory
    def body(number, tmpdir):
        Path(tmpdir, "file").write_text(str(number))
        return tmpdir

    assert not os.path.exists(body(3, tmpdir="of pytest"))


def test_the_content_of_a_directory_is_deleted_and_what_links_lead_to_stays(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "link").symlink_to(kept)
    delete_directory_content(str(folder))
    assert list(folder.iterdir()) == []
    assert (kept / "file").exists()
    with pytest.raises(InvalidValueError, match="not a folder"):
        delete_directory_content(str(tmp_path / "none"))


def test_a_flaky_test_is_run_again_and_a_failing_one_fails():
    attempts = []

    @retry_flaky_test(3)
    def body(needed):
        attempts.append(needed)
        assert len(attempts) >= needed

    body(3)
    assert len(attempts) == 3
    attempts.clear()
    with pytest.raises(AssertionError):
        body(4)
    assert len(attempts) == 3


def test_slow_tests_need_their_variable(monkeypatch):
    monkeypatch.delenv("QUARK_TEST_WITH_SLOW", raising=False)
    body = slow_test(lambda: "ran")
    with pytest.raises(unittest.SkipTest):
        body()
    assert slow_test_if(False)(lambda: "ran")() == "ran"
    assert with_env(QUARK_TEST_WITH_SLOW="1")(body)() == "ran"

    class Case(TestCase):
        def test_fast(self) -> None: ...

        @slow_test
        def test_slow(self) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUARK_TEST_SKIP_FAST", "1")
        patch.setenv("QUARK_TEST_WITH_SLOW", "1")
        result = unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(unittest.TestResult())
    assert [test.id().rpartition(".")[2] for test, _ in result.skipped] == ["test_fast"]


def test_outputs_are_compared_in_lists_with_the_place_of_the_difference():
    ones = np.ones(3)
    assert_outputs_equivalent([ones, 2.0], (ones + 1e-9, 2.0))
    with pytest.raises(AssertionError, match=r"\[1\]"):
        assert_outputs_equivalent([ones, ones], [ones, ones + 1e-3])
    assert_outputs_equivalent(ones, ones + 1e-3, atol=1e-2)
    with pytest.raises(AssertionError):
        assert_outputs_equivalent([ones], [ones, ones])


def test_variants_run_with_the_same_seed_and_must_agree():
    assert run_op_variants(lambda: np.random.rand()) == run_op_variants(lambda: np.random.rand())
    runs = iter([1.0, 2.0])
    with pytest.raises(AssertionError, match="two variants"):
        run_op_variants(lambda: next(runs), legacy_ctx=nullcontext(), stable_ctx=nullcontext())
