"""How far two networks are apart is computed in `quark.compare` and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import quark.compare
import quark.fidelity

SOURCE = Path(quark.__file__).parent
# Functions that do not compare two networks.
ALLOWED = {
    ("gain_db", "decibels"): "the gain of smoothing by an estimate, which has no reference",
    ("_start_of_lsq", "squared error"): "the error of rounding a weight, for each step size that is tried",
    ("codes_and_errors", "squared error"): "the same, inside of it",
    ("searched_float_scales", "squared error"): "the error of rounding a weight, for each scale that is tried",
    ("with_lowest_code", "squared error"): "the same, of two scales",
    ("statistics", "squared error"): "how far the largest of two samples differ, relative to their size",
    ("chosen_damping", "squared error"): "the error of rounding a weight on held rows, for each damping that is tried",
    ("output_loss", "divergence"): "a loss in torch, which has to be differentiated",
}


def _name(node: ast.expr) -> str:
    """The last part of a function's or variable's name."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_difference(node: ast.expr) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub)


def _is_squared_difference(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _is_difference(node.left) and isinstance(node.right, ast.Constant) and node.right.value == 2
    return isinstance(node, ast.Call) and _name(node) == "square" and any(map(_is_difference, node.args))


def _is_divergence(node: ast.expr) -> bool:
    """p * (log p - log q), or exp(x) * (x - y) with x and y the logarithms."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    for factor, rest in ((node.left, node.right), (node.right, node.left)):
        if isinstance(rest, ast.BinOp) and isinstance(rest.op, ast.Sub):
            are_logs = "log" in _name(rest.left) and "log" in _name(rest.right)
            if are_logs or (_name(factor) == "exp" and ast.dump(rest.left) in ast.dump(factor)):
                return True
    return False


def measures_in(tree: ast.AST) -> set[str]:
    """The measures that a piece of code computes by itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if "log10" in (_name(node.left), _name(node.right)):
                found.add("decibels")
            calls = [_name(each) for each in ast.walk(node) if isinstance(each, ast.Call)]
            if calls.count("norm") > 1 or calls.count("sqrt") > 1:
                found.add("cosine")
        if isinstance(node, ast.Compare) and [_name(node.left), *map(_name, node.comparators)] == ["argmax"] * 2:
            found.add("agreement")
        if isinstance(node, ast.Call) and _name(node) == "sum":
            summed = node.func.value if isinstance(node.func, ast.Attribute) else None
            if any(arg is not None and _is_squared_difference(arg) for arg in (summed, *node.args)):
                found.add("squared error")
        if isinstance(node, ast.expr) and _is_divergence(node):
            found.add("divergence")
    return found


def test_no_other_function_computes_a_measure():
    found = {
        (node.name, measure): path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if SOURCE / "compare" not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for measure in measures_in(node)
    }
    others = {key: path for key, path in found.items() if key not in ALLOWED}
    assert not others, "compute these by functions of quark.compare.measures"
    assert set(ALLOWED) <= set(found), "no longer there: take it out of ALLOWED"


@pytest.mark.parametrize("measure", ["decibels", "cosine", "agreement", "squared error", "divergence"])
def test_the_search_above_finds_each_measure_in_its_home(measure):
    assert measure in measures_in(ast.parse((SOURCE / "compare" / "measures.py").read_text(encoding="utf-8")))


def test_the_earlier_name_of_the_package_still_works():
    assert quark.fidelity.__all__ == quark.compare.__all__
    assert all(getattr(quark.fidelity, name) is getattr(quark.compare, name) for name in quark.compare.__all__)
