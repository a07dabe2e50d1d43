"""The sums of products of a layer's inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quark.demo import network_path
from quark.demo.digits import load_digits
from quark.errors import InvalidValueError
from quark.features.bias_correction.taps import Window
from quark.features.compensation import input_products
from quark.features.compensation.input_products import InputProducts, Sums, rows_in_blocks
from quark.features.finetuning.layers import ConvolutionRows, MatrixRows, TrainedLayer, trained_layers
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.onnx import quantize
from quark.onnx.blas_threads import _openblas, one_blas_thread
from quark.onnx.calibrate import survey_together
from quark.onnx.load import load
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice, QuantizationPlan, Reader, Role, TensorChoice
from quark.rounded import rounded

INT8 = AffineChoice("int8", (0.0625,), (0,))


@pytest.fixture
def layer() -> TrainedLayer:
    from onnx_models import Net

    net = Net(opset=17)
    y = net.node("MatMul", net.input("x", (64, 5)), net.weight(5, 3, name="w"), name="product")
    weight = TensorChoice("w", Role.WEIGHT, AffineChoice("int8", (0.01,), (0,)), (Reader("product", 1),))
    (found,), _ = trained_layers(load(net.model(y)).model, QuantizationPlan((weight,)), ("MatMul",))
    return found


def sums_of(layer: TrainedLayer, data: Choice | None, samples: list[np.ndarray]) -> Sums:
    products = InputProducts()
    products.add(layer, data, len(samples))
    for x in samples:
        products.observe(x)
        products.end_of_sample()
    sums = products.sums[layer.name]
    sums.finish()
    return sums


@pytest.mark.parametrize("waiting", [1, 3000, 1 << 20], ids=["sample by sample", "some samples", "all samples"])
@pytest.mark.parametrize("data", [None, INT8, FloatChoice("bfloat16")], ids=["float", "int8", "bfloat16"])
def test_sums_are_those_of_all_rows(
    layer: TrainedLayer, data: Choice | None, waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_products, "WAITING_BYTES", waiting)
    samples = [np.random.default_rng(i).standard_normal((64, 5)).astype(np.float32) + 1 for i in range(5)]
    found = sums_of(layer, data, samples)
    x = np.concatenate(samples).astype(np.float64)
    z = x if data is None else rounded(np.concatenate(samples), data).astype(np.float64)
    assert found.seen == len(x)
    np.testing.assert_allclose(found.inner[0], z.T @ z, rtol=1e-5, atol=1e-3)
    assert (found.cross is not None) == isinstance(data, FloatChoice), "integers have no cross products"
    if found.cross is not None:
        np.testing.assert_allclose(found.cross[0], x.T @ z, rtol=1e-5, atol=1e-3)
    assert (found.aside is not None) == (data is None)
    if found.aside is not None:
        held_back = samples[3].astype(np.float64)
        np.testing.assert_allclose(found.aside[0], held_back.T @ held_back, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "groups", "window"),
    [
        ((2, 40, 6, 7), 1, Window(3, pad_begin=1, pad_end=1)),
        ((1, 40, 6, 7), 40, Window(3, 2)),
        ((3, 70, 5, 5), 1, Window(1)),
    ],
)
def test_rows_of_a_convolution_round_as_the_tensor_does(
    layer: TrainedLayer, shape: tuple[int, ...], groups: int, window: Window
) -> None:
    source = ConvolutionRows((window, window), groups)
    convolution = replace(layer, source=source)
    choice = BlockChoice(BlockQuantizer(get_format("mxfp4_e2m1")), axis=1)
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    picks = np.arange(0, shape[0] * len(window.sources(shape[2])) * len(window.sources(shape[3])), 3)
    found = rows_in_blocks(convolution, choice, source.inputs(x, picks), 4)
    np.testing.assert_array_equal(found, source.inputs(rounded(x, choice), picks))
    across_space = replace(choice, axis=2)
    assert rows_in_blocks(convolution, across_space, source.inputs(x, picks), 4) is None


def test_rows_of_a_product_round_as_the_tensor_does(layer: TrainedLayer) -> None:
    choice = BlockChoice(BlockQuantizer(get_format("mx6")), axis=2)
    x, picks = np.random.default_rng(0).normal(size=(2, 64, 50)).astype(np.float32), np.arange(0, 128, 5)
    found = rows_in_blocks(layer, choice, layer.source.inputs(x, picks), 3)
    np.testing.assert_array_equal(found, layer.source.inputs(rounded(x, choice), picks))
    transposed = replace(layer, source=MatrixRows(is_transposed=True))
    assert rows_in_blocks(transposed, choice, layer.source.inputs(x, picks), 3) is None
    open_scale = BlockChoice(BlockQuantizer(get_format("nvfp4")), axis=2)
    assert rows_in_blocks(layer, open_scale, layer.source.inputs(x, picks), 3) is None


def test_rows_that_are_not_finite_are_an_error(layer: TrainedLayer) -> None:
    x = np.ones((64, 5), np.float32)
    x[:, 2] = np.nan
    with pytest.raises(InvalidValueError, match="NaN or Inf"):
        sums_of(layer, INT8, [x])


def test_products_take_one_thread_and_get_theirs_back() -> None:
    library = _openblas()
    if library is None:
        pytest.skip("numpy has no OpenBLAS of its own here")
    threads, _ = library
    before = threads()
    with one_blas_thread():
        assert threads() == 1
        with one_blas_thread():
            assert threads() == 1
        assert threads() == 1
    assert threads() == before


def test_layers_that_do_not_fit_in_memory_together_are_surveyed_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digits = [{"input": image[None]} for image in load_digits()[0].images[:16]]
    runs = []

    def counted(*arguments: Any, **named: Any) -> Any:
        runs.append(len(arguments[1][-1][0]))
        return survey_together(*arguments, **named)

    monkeypatch.setattr(input_products, "survey_together", counted)
    together = quantize(network_path(), digits, "MX6").model
    assert len(runs) == 1
    monkeypatch.setattr(input_products, "SURVEY_BYTES", 1)
    apart = quantize(network_path(), digits, "MX6").model
    assert runs == [sum(runs[1:]), *[1] * (len(runs) - 1)]
    assert apart.graph == together.graph
