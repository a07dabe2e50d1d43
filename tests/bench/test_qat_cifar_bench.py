"""The methods of the training benchmark are what their names say, and a figure is a row."""

from __future__ import annotations

from argparse import Namespace

from bench.qat_cifar import HEADER, RECIPES, Figure, chosen_recipe

from quark.decide.specs import AffineSpec, BlockSpec
from quark.vision.training import Autocast


def test_lsq4_has_four_bits_inside_and_eight_at_both_ends() -> None:
    settings = RECIPES["lsq4"].config().settings()
    found = {**settings.by_type, **settings.by_name}
    bits = {}
    for name, specs in found.items():
        assert specs is not None
        assert isinstance(specs.activation, AffineSpec)
        assert isinstance(specs.weight, AffineSpec)
        bits[name] = (specs.activation.integer.bits, specs.weight.integer.bits)
    assert bits == {"Conv2d": (4, 4), "conv1": (8, 8), "linear": (8, 8)}
    assert settings.specs.activation is settings.specs.weight is None


def test_the_same_four_bits_with_and_without_compensation() -> None:
    compensated, plain = (RECIPES[name].config().settings() for name in ("fixed4", "fixed4_uncompensated"))
    assert (set(compensated.features), set(plain.features)) == ({"compensation"}, set())
    assert (compensated.by_type, compensated.by_name) == (plain.by_type, plain.by_name)
    specs = compensated.by_type["Conv2d"]
    assert specs is not None
    assert isinstance(specs.weight, AffineSpec)
    assert (specs.weight.integer.bits, specs.weight.learning) == (4, None)


def test_block_formats_are_on_both_operands() -> None:
    for method, name in (("mxfp4", "mxfp4_e2m1"), ("nvfp4", "nvfp4"), ("mx6", "mx6")):
        specs = RECIPES[method].config().settings().specs
        assert isinstance(specs.activation, BlockSpec)
        assert specs.activation == specs.weight
        assert specs.activation.quantizer.format.name == name
        assert specs.output is None


def test_tqt_is_what_an_npu_takes() -> None:
    assert RECIPES["tqt"].config().settings().applies_npu_rules


def test_the_command_line_changes_what_it_names_and_nothing_else() -> None:
    given = Namespace(
        epochs=1,
        learning_rate=None,
        threshold_learning_rate=None,
        distillation=0.5,
        seed=None,
        average_decay=None,
        autocast=True,
        batch_size=64,
    )
    recipe, usual = chosen_recipe(given, "lsq4"), RECIPES["lsq4"].options
    options = recipe.options
    assert recipe.batch_size == 64
    assert (options.epochs, options.distillation, options.autocast) == (1, 0.5, Autocast.BFLOAT16)
    assert (options.learning_rate, options.optimizer) == (usual.learning_rate, usual.optimizer)


def test_a_figure_is_a_row() -> None:
    cells = dict(zip(HEADER, Figure("tqt", 91.73, 91.5, 91.6, 2, 3.21).cells(), strict=True))
    assert (cells["QAT less float"], cells["minutes"]) == ("-0.13", "3.2")
