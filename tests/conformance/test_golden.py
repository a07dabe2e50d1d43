"""Every form of every quantizer gives the golden values, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
from backends import BACKENDS
from golden import cases, load, quantizer, quantizer_names


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", quantizer_names())
def test_golden_values(name: str, backend: str) -> None:
    for case in cases(name):
        before = case.x.copy()
        actual = BACKENDS[backend](case.x, quantizer(name), case.axis)
        assert actual.shape == case.x.shape
        assert actual.dtype == np.float32
        wrong = case.mismatches(actual)
        assert not wrong.any(), (
            f"{name} {case.name}: {wrong.sum()} of {wrong.size}, first input {case.x[wrong][0]!r} "
            f"gave {actual[wrong][0]!r}, expected {case.expected[wrong][0]!r}"
        )
        assert np.array_equal(before.view(np.int32), case.x.view(np.int32)), "the input was written to"


@pytest.mark.parametrize("name", quantizer_names())
def test_golden_values_in_float64(name: str) -> None:
    for case in cases(name):
        actual = BACKENDS["numpy"](case.x.astype(np.float64), quantizer(name), case.axis)
        with np.errstate(over="ignore"):
            assert not case.mismatches(actual.astype(np.float32)).any(), case.name


def test_the_file_is_whole() -> None:
    assert sum(value.size for key, value in load().items() if key.startswith("out__")) == 233_487
    assert len(quantizer_names()) == 55
