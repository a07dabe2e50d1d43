"""A plan survives JSON, says what it is, and refuses what it cannot be."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from quark.errors import InvalidValueError
from quark.files.indented import indented_json
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS, get_format
from quark.formats.spec import NonFinite, Rounding, ScaleRule
from quark.ops.schema import quantizer_of
from quark.plan import (
    AffineChoice,
    BlockChoice,
    DynamicChoice,
    FloatChoice,
    QuantizationPlan,
    Reader,
    Role,
    SkippedNode,
    TensorChoice,
)

ODD_BLOCKS = quantizer_of("BFPQuantizeDequantize", {"bfp_method": "to_bfp_prime", "bit_width": 14, "block_size": 24})[0]
CHOICES = [
    AffineChoice("int8", (0.1,), (0,)),
    AffineChoice("uint8", (1 / 3, 2.0**-126), (3, 255), axis=1),
    AffineChoice("int4", (0.5,) * 6, (0,) * 6, axis=0, group_size=32),
    AffineChoice("int4", (0.5, 0.25, 2.0**-140) * 3000, (0, -8, 7) * 3000, axis=0, group_size=32),
    AffineChoice("uint16", (0.1, 1 / 3) * 3000, (0, 65535) * 3000, axis=0),
    FloatChoice("bfloat16", is_saturating=True),
    DynamicChoice("uint8"),
    BlockChoice(ODD_BLOCKS, -2, to_bfloat16_first=True),
    *(
        BlockChoice(BlockQuantizer(fmt, ScaleRule.FLOOR, Rounding.HALF_UP, NonFinite.PASSTHROUGH), 1)
        for fmt in BLOCK_FORMATS
    ),
    BlockChoice(BlockQuantizer(get_format("mxfp4_e2m1").with_block_size(16), ScaleRule.MSE), 0),
]


def plan_of(*choices) -> QuantizationPlan:
    tensors = [
        TensorChoice(f"t{i}", Role.ACTIVATION, choice, (Reader("n", i), Reader("", 0)), "why")
        for i, choice in enumerate(choices)
    ]
    return QuantizationPlan(tuple(tensors), (SkippedNode("s", "Softmax", "not wanted"),))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_json_gives_an_equal_plan_back(choice):
    plan = plan_of(choice)
    back = QuantizationPlan.from_json(plan.to_json())
    assert back == plan
    assert back.digest == plan.digest


def test_many_scales_take_little_room():
    choice = AffineChoice("int4", (1 / 4096,) * 100_000, (0,) * 100_000, axis=0, group_size=32)
    assert len(plan_of(choice).to_json()) < 8 * 100_000
    assert '"scale": [' in plan_of(replace(choice, scale=(0.5,) * 64, zero_point=(0,) * 64)).to_json()


def test_digest_tells_plans_apart():
    plan = plan_of(*CHOICES)
    other = replace(plan, tensors=(replace(plan.tensors[0], reason="another"), *plan.tensors[1:]))
    assert plan.digest != other.digest


def test_of_finds_all_choices_for_a_tensor():
    plan = plan_of(*CHOICES)
    assert plan.of("t3") == (plan.tensors[3],)
    assert plan.of("nothing") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "quantization plan is not valid JSON"),
        ("[1]", "expected a mapping"),
        ("[" * 3000, "quantization plan is nested"),
        ('{"version": 99}', "version 99"),
        ('{"version": 1, "tensors": [{}], "skipped": []}', "readers"),
        ('{"version": 1, "tensors": [], "skipped": [{"bad": 1}]}', "bad"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(InvalidValueError, match=message):
        QuantizationPlan.from_json(text)


def test_unknown_kind_of_choice_is_named():
    content = json.loads(plan_of(CHOICES[0]).to_json())
    content["tensors"][0]["choice"]["kind"] = "ternary"
    with pytest.raises(InvalidValueError, match="ternary"):
        QuantizationPlan.from_json(json.dumps(content))


@pytest.mark.parametrize(
    "fields",
    [
        {"format": "mxint8", "scale": (1.0,), "zero_point": (0,)},
        {"format": "int8", "scale": (1.0, 2.0), "zero_point": (0,)},
        {"format": "int8", "scale": (1.0, 2.0), "zero_point": (0, 0)},
        {"format": "int8", "scale": (), "zero_point": ()},
    ],
)
def test_impossible_affine_choices_are_refused(fields):
    with pytest.raises(InvalidValueError):
        AffineChoice(**fields)


@pytest.mark.parametrize(
    "content",
    [
        *(None, True, -1, 1e300, "", "a\n\u00e9", [], {}, (), [[]], [{}], {"": {}}),
        [1, 2.5, None, "x"],
        (Role.WEIGHT, [Role.BIAS, (1, (2, 3))], {"a": ()}),
        {"a": 1, "b": [1.5, False], "c": {"d": [], "e": [[1], {"f": "\\"}]}},
        {1: "integer", 2.5: [1], None: {True: 0}, "text": {7: 7}},
    ],
    ids=repr,
)
def test_indented_json_is_what_python_writes(content):
    assert indented_json(content) == json.dumps(content, indent=1, allow_nan=False)


@pytest.mark.parametrize("content", [float("nan"), [float("inf")], {"a": [[], float("-inf")]}, {float("nan"): []}])
def test_indented_json_refuses_what_json_has_not(content):
    with pytest.raises(ValueError, match="JSON compliant"):
        indented_json(content)
