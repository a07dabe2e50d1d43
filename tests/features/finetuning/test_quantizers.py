"""What training rounds to is what the quantized network computes with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fitted_layers import affine, choices_of, normal

from quark.errors import InvalidValueError
from quark.features.finetuning.problem import Part, WeightLayout
from quark.features.finetuning.quantizers import quantizer_of
from quark.features.finetuning.training import are_outputs_separate, neighbours
from quark.formats.affine import is_in_range
from quark.plan import AffineChoice, BlockChoice, Choice, DynamicChoice, FloatChoice
from quark.rounded import parameters_of, rounded

CPU = torch.device("cpu")
WEIGHT = normal(1, 6, 18, 3) * np.logspace(-2, 1, 6, dtype=np.float32)[:, None, None]
CHOICES = dict(choices_of(WEIGHT))


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_values_are_those_of_the_quantized_network(choice: Choice) -> None:
    given = torch.from_numpy(WEIGHT.copy())
    found = quantizer_of(choice, WEIGHT.shape, CPU).values(given)
    np.testing.assert_array_equal(found.numpy(), rounded(WEIGHT, choice))
    np.testing.assert_array_equal(given.numpy(), WEIGHT)  # is left alone


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_one_of_the_neighbours_is_the_value_and_both_are_kept(choice: Choice) -> None:
    lower, upper = neighbours(WEIGHT, choice)
    nearest = rounded(WEIGHT, choice)
    assert ((nearest == lower) | (nearest == upper)).all()
    mixed = np.where(normal(2, *WEIGHT.shape) > 0, lower, upper)
    np.testing.assert_array_equal(rounded(mixed, choice), mixed)


@pytest.mark.parametrize("name", ["bfp16", "mx9", "mxfp4_e2m1", "int8", "bfloat16"])
def test_a_scale_of_one_axis(name: str) -> None:
    choice = dict(choices_of(WEIGHT))[name]
    scale = normal(3, 40)
    np.testing.assert_array_equal(
        quantizer_of(choice, scale.shape, CPU).values(torch.from_numpy(scale)).numpy(), rounded(scale, choice)
    )


@pytest.mark.parametrize("name", ["int8", "uint8", "int4 per group", "int16 per channel"])
def test_the_gradient_passes_exactly_within_the_range(name: str) -> None:
    choice = CHOICES[name]
    assert isinstance(choice, AffineChoice)
    wide = WEIGHT * 3
    found = quantizer_of(choice, wide.shape, CPU).passes(torch.from_numpy(wide))
    expected = is_in_range(wide, parameters_of(choice, wide.shape))
    assert found is not None
    np.testing.assert_array_equal(found.numpy(), expected)
    assert expected.any()
    assert not expected.all()


def test_the_edges_of_the_range() -> None:
    choice = AffineChoice("int4", (0.5,), (1,))  # levels -9 to 6
    x = torch.tensor([-4.75, -4.74, -4.5, 3.0, 3.24, 3.25, 3.26])
    passes = quantizer_of(choice, (7,), CPU).passes(x)
    assert passes is not None
    # half a step beyond rounds to the even level: -9.5 to -10 which is not there, 6.5 to 6 which is
    assert passes.tolist() == [False, True, True, True, True, True, False]


@pytest.mark.parametrize("name", ["mx6", "bfp16", "float16", "bfloat16"])
def test_the_gradient_of_what_has_no_fixed_range_passes(name: str) -> None:
    assert quantizer_of(CHOICES[name], WEIGHT.shape, CPU).passes(torch.from_numpy(WEIGHT)) is None


def test_a_bias_of_32_bits() -> None:
    bias = normal(5, 6) * 1000
    choice = AffineChoice("int32", tuple(np.full(6, 1e-5)), (0,) * 6, 0)
    found = quantizer_of(choice, bias.shape, CPU).values(torch.from_numpy(bias)).numpy()
    np.testing.assert_allclose(found, rounded(bias, choice), rtol=1e-6)
    np.testing.assert_allclose(found, bias, rtol=1e-5)


def test_scales_of_run_time_are_refused() -> None:
    choice = DynamicChoice("uint8")
    with pytest.raises(InvalidValueError, match="run time"):
        quantizer_of(choice, (2, 2), CPU)
    with pytest.raises(InvalidValueError, match="run time"):
        neighbours(normal(6, 2, 2), choice)


def test_a_scale_by_channel_goes_with_any_number_of_rows() -> None:
    rows = normal(7, 9, 5)
    choice = affine(rows, "int8", 1)
    quantizer = quantizer_of(choice, (100, 5), CPU)
    np.testing.assert_array_equal(quantizer.values(torch.from_numpy(rows)).numpy(), rounded(rows, choice))


FLOAT8 = FloatChoice("fp8_e4m3", True, tuple((np.abs(WEIGHT).max(axis=(1, 2)) / 448).tolist()), 0)


@pytest.mark.parametrize("choice", [*CHOICES.values(), FLOAT8], ids=[*CHOICES, "fp8_e4m3 per channel"])
def test_a_part_rounds_as_the_whole(choice: Choice) -> None:
    if isinstance(choice, BlockChoice):  # plans hold the tensor scale of a weight
        choice = replace(choice, quantizer=choice.quantizer.fixed(WEIGHT))
    layout = WeightLayout(WEIGHT.shape, (1, *WEIGHT.shape), (0, 1, 2, 3))
    if not are_outputs_separate(layout, choice):
        pytest.skip("blocks reach across outputs")
    part = Part(outputs=slice(2, 5))
    quantizer = quantizer_of(choice, WEIGHT.shape, CPU).part(layout, part)
    found = quantizer.values(part.of(layout.to_matrices(torch.from_numpy(WEIGHT.copy()))))
    np.testing.assert_array_equal(found.numpy(), layout.to_matrices(rounded(WEIGHT, choice))[:, 2:5])
