"""Python's search for cycles is rarer while a network is quantized, and as it was afterwards."""

from __future__ import annotations

import gc

import pytest

from quark.demo import network_path
from quark.onnx import quantize
from quark.onnx.garbage import OBJECTS, rare_collections


@pytest.fixture(autouse=True)
def usual_thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_are_restored_after_the_last_of_several():
    gc.set_threshold(700, 9, 8)
    first, second = rare_collections(), rare_collections()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() == (OBJECTS, 9, 8)
    first.__exit__(None, None, None)
    assert gc.get_threshold() == (OBJECTS, 9, 8)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 9, 8)


@pytest.mark.parametrize("threshold", [0, 2 * OBJECTS])
def test_collections_do_not_become_more_frequent(threshold):
    gc.set_threshold(threshold, 10, 10)
    with rare_collections():
        assert gc.get_threshold()[0] == threshold


def test_quantizing_leaves_the_thresholds_as_they_were():
    before = gc.get_threshold()
    quantize(network_path(), None, "MXINT8")
    assert gc.get_threshold() == before
