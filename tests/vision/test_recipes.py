"""What each pair of flags stands for, in the words that the steps read."""

import itertools

import pytest

from quark.decide.specs import AffineSpec, Algorithm
from quark.errors import InvalidValueError
from quark.ranges import MinMax, MinMSE
from quark.ranges.method import MOVING_AVERAGE_CONSTANT
from quark.vision.quantizing import LEARNING, Method, Precision, recipe

PAIRS = list(itertools.product(Method, (Precision.A8W8, Precision.A16W8)))
POWERS_OF_TWO = (Method.MSE_POWOF2, Method.NON_OVERFLOW, Method.TQT)


@pytest.mark.parametrize(("method", "precision"), PAIRS, ids=str)
def test_a_recipe_is_what_its_flags_say(method, precision):
    settings = recipe(method, precision).settings()
    specs = settings.specs
    assert specs.activation == specs.output
    assert all(isinstance(value, AffineSpec) for value in (specs.activation, specs.weight, specs.bias))
    assert specs.activation.format == {"a8w8": "int8", "a16w8": "int16"}[precision.value]
    assert specs.weight.format == "int8"
    assert specs.activation.is_power_of_two == specs.weight.is_power_of_two == (method in POWERS_OF_TWO)
    learned = [value.learning.algorithm for value in (specs.activation, specs.weight) if value.learning is not None]
    assert learned == ([Algorithm(method.value)] * 2 if method in LEARNING else [])
    assert specs.bias.learning is None
    assert specs.activation.is_symmetric == (method is not Method.FLOAT_SCALE)
    assert specs.weight.is_symmetric
    is_by_channel = specs.weight.is_per_channel
    assert is_by_channel == (method is Method.FLOAT_SCALE)


def test_float_scales_of_eight_bits_are_for_average_ranges():
    methods = {
        precision: recipe(precision=precision).settings().specs.activation.method for precision in list(Precision)[:3]
    }
    assert methods[Precision.A8W8] == methods[Precision.A8W4] == MinMax(MOVING_AVERAGE_CONSTANT)
    assert methods[Precision.A16W8] == MinMSE()


@pytest.mark.parametrize(("method", "precision"), PAIRS, ids=str)
def test_eight_bits_with_powers_of_two_are_for_an_npu(method, precision):
    is_for_npu = method in POWERS_OF_TWO and precision is Precision.A8W8
    assert recipe(method, precision).settings().applies_npu_rules == is_for_npu


def test_narrow_and_float_numbers_have_scales_of_their_own():
    weights = {precision: recipe(precision=precision).settings().specs for precision in list(Precision)[2:]}
    assert {key.value: (weight.activation.format, weight.weight.format) for key, weight in weights.items()} == {
        "a8w4": ("int8", "int4"),
        "fp8": ("fp8_e4m3", "fp8_e4m3"),
        "nvfp4": ("nvfp4", "nvfp4"),
    }
    assert weights[Precision.A8W4].weight.group_size == 32
    assert weights[Precision.FP8].weight.is_per_channel
    for method, precision in itertools.product(list(Method)[1:], weights):
        with pytest.raises(InvalidValueError, match=f"{method.value} with {precision.value}"):
            recipe(method, precision)
