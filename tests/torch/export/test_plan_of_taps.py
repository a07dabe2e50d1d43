"""Taps in odd places: behind each other, between an input and an output, on one tensor several times."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from frozen_networks import example_of, frozen_network

from quark.formats.block import BlockQuantizer
from quark.formats.catalog import get_format
from quark.onnx.insert import insert
from quark.onnx.session import open_session
from quark.plan import AffineChoice, BlockChoice, FloatChoice, Reader, Role
from quark.rounded import rounded
from quark.torch.export.plan_of_taps import remove_taps, transposed_choice
from quark.torch.export.translate import Tap, with_taps
from quark.torch.graph import layer_name

torch.set_num_threads(1)
COARSE = AffineChoice("int8", (0.5,), (0,))
FINE = AffineChoice("int8", (0.125,), (3,))


def tapped_model(body: str) -> ir.Model:
    head = '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1]>'
    model = ir.from_onnx_text(f"{head} network (float[n,4] x) => (float[n,4] y, float[n,4] z) {{ {body} }}")
    for node in model.graph:
        node.name = f"{node.op_type}_{node.outputs[0].name}"
    return model


def tap(number: int, tensor: str, choice: AffineChoice | None = COARSE) -> Tap:
    return Tap(number, tensor, Role.ACTIVATION, choice)


def result_of(model: ir.Model, x: np.ndarray) -> list[np.ndarray]:
    # optimized, ONNX Runtime would make one pair of two behind each other, with a scale of its own
    return open_session(model, threads=1, has_optimizations=False).run(None, {"x": x})


X = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)
CASES = {
    "several readers": (
        "a = com.microsoft.QuarkTap<number=0>(x) b = com.microsoft.QuarkTap<number=1>(x) y = Neg(a) z = Neg(b)",
        [tap(0, "x"), tap(1, "x", FINE)],
        lambda x: [-rounded(x, COARSE), -rounded(x, FINE)],
    ),
    "behind each other": (
        "a = com.microsoft.QuarkTap<number=0>(x) b = com.microsoft.QuarkTap<number=1>(a) y = Neg(b) z = Neg(x)",
        [tap(0, "x", FINE), tap(1, "a")],
        lambda x: [-rounded(rounded(x, FINE), COARSE), -x],
    ),
    "input to output": (
        "y = com.microsoft.QuarkTap<number=0>(x) z = Neg(x)",
        [tap(0, "x")],
        lambda x: [rounded(x, COARSE), -x],
    ),
    "output twice": (
        "z = Neg(x) y = com.microsoft.QuarkTap<number=0>(z)",
        [tap(0, "z")],
        lambda x: [rounded(-x, COARSE), -x],
    ),
    "a mark": (
        (
            "a = com.microsoft.QuarkTap<number=0>(x) y = Neg(a) c = Abs(x) "
            "b = com.microsoft.QuarkTap<number=1>(c) z = Neg(b)"
        ),
        [tap(0, "x", None), tap(1, "abs", None)],
        lambda x: [-x, -np.abs(x)],
    ),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_graph_without_its_taps_computes_the_same(case: str) -> None:
    body, taps, expected = CASES[case]
    model = tapped_model(body)
    model.graph.sort()
    plan = remove_taps(model, taps).plan({})
    assert not [node for node in model.graph if node.op_type == "QuarkTap"]
    insert(model, plan)
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    for actual, wanted in zip(result_of(model, X), expected(X), strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_taps_that_do_the_same_to_a_tensor_become_one_choice() -> None:
    body = "a = com.microsoft.QuarkTap<number=0>(x) b = com.microsoft.QuarkTap<number=1>(x) y = Neg(a) z = Abs(b)"
    model = tapped_model(body)
    plan = remove_taps(model, [tap(0, "x"), tap(1, "x")]).plan({"x": "why"})
    (choice,) = plan.tensors
    assert choice.readers == (Reader("Neg_y", 0), Reader("Abs_z", 0))
    assert choice.reason == "why"


@pytest.mark.parametrize(
    "choice",
    [
        AffineChoice("int8", (0.1, 0.2, 0.3, 0.4), (1, 2, 3, 4), axis=0),
        AffineChoice("int4", tuple(0.1 * i for i in range(1, 9)), tuple(range(8)), axis=1, group_size=8),
        BlockChoice(BlockQuantizer(get_format("mx6")), -1),
        FloatChoice("bfloat16"),
    ],
    ids=str,
)
def test_a_transposed_choice_does_to_the_turned_array_what_the_choice_does(choice) -> None:
    array = np.random.default_rng(2).normal(size=(4, 16)).astype(np.float32)
    turned = rounded(np.ascontiguousarray(array.T), transposed_choice(choice, array.shape, (1, 0)))
    np.testing.assert_array_equal(turned.T, rounded(array, choice))


def test_a_network_with_taps_shares_its_parameters_and_leaves_the_network() -> None:
    network = frozen_network("plain", "int8")
    nodes = [str(node) for node in network.graph.nodes]
    with_them, taps = with_taps(network)
    assert [str(node) for node in network.graph.nodes] == nodes
    assert {id(parameter) for parameter in with_them.parameters()} <= {
        id(parameter) for parameter in network.parameters()
    }
    quantizers = [tap for tap in taps if tap.choice is not None]
    assert {quantizer.tensor for quantizer in quantizers} == {tensor.tensor for tensor in network.plan}
    x = example_of("plain")
    assert not torch.equal(with_them(x)[0], network(x))  # taps do not round
    marked = {tap.tensor for tap in taps if tap.choice is None and tap.role is Role.ACTIVATION}
    assert {layer_name(node) for node in network.graph.nodes if node.name in marked} >= {"features.0", "features.2"}
