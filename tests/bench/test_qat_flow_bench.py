"""The recipes whose steps are timed are what their names say, and every row has its float network beside it."""

from __future__ import annotations

from argparse import Namespace

from bench.qat_flow import FLOAT, HEADER, METHODS, Bench
from bench.timing import Timing

from quark.decide.specs import AffineSpec, BlockSpec


def test_learned_steps_have_the_bits_of_their_names() -> None:
    for method, bits in (("int8", 8), ("w4a4", 4)):
        specs = METHODS[method]().settings().specs
        assert isinstance(specs.activation, AffineSpec)
        assert isinstance(specs.weight, AffineSpec)
        assert (specs.activation.integer.bits, specs.weight.integer.bits) == (bits, bits)
        assert specs.activation.has_one_scale
        assert not specs.weight.has_one_scale


def test_block_formats_are_on_both_operands() -> None:
    for method, name in (("mxfp4", "mxfp4_e2m1"), ("nvfp4", "nvfp4")):
        specs = METHODS[method]().settings().specs
        assert isinstance(specs.activation, BlockSpec)
        assert specs.activation == specs.weight
        assert specs.activation.quantizer.format.name == name


def test_steps_of_float_and_of_the_method_are_timed_side_by_side() -> None:
    given = Namespace(
        device="cpu",
        batch=2,
        image=32,
        modes=["eager"],
        steps=1,
        repeat=2,
        channels_last=True,
        autocast=True,
    )
    timings = Bench("cifar_resnet20", given).measure("w4a4")
    assert list(timings) == [f"eager {FLOAT}", "eager w4a4"]
    assert all(timing.turns == 2 and timing.best > 0 for timing in timings.values())


def test_a_row_is_relative_to_float_in_its_mode_and_to_eager_float() -> None:
    bench = object.__new__(Bench)
    bench.name, bench.arguments = "resnet18", Namespace(modes=["eager", "compiled"])
    seconds = {"eager float": 4.0, "eager int8": 6.0, "compiled float": 2.0, "compiled int8": 3.0}
    rows = bench.rows("int8", {name: Timing.of([second]) for name, second in seconds.items()})
    found = [dict(zip(HEADER, row, strict=True)) for row in rows]
    assert [(each["mode"], each["method"], each["of float"], each["of eager float"]) for each in found] == [
        ("eager", "float", "1.00 x", "1.00 x"),
        ("eager", "int8", "1.50 x", "1.50 x"),
        ("compiled", "float", "1.00 x", "0.50 x"),
        ("compiled", "int8", "1.50 x", "0.75 x"),
    ]
