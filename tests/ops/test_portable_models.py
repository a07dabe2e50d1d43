"""What `add_portable_functions` does to a model, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from golden import same
from onnx import TensorProto, helper

from quark.errors import ModelError
from quark.formats.quantize import quantize_dequantize
from quark.ops.portable_functions import add_portable_functions
from quark.ops.schema import DOMAIN

MX, BFP = "MXQuantizeDequantize", "BFPQuantizeDequantize"
FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16


def value(name: str, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, ["n", 40])


def block_node(x: str, y: str, op_type: str = MX, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, [x], [y], f"{y}_node", domain=DOMAIN, rounding_mode=2, **attributes)


def make_model(nodes: list[onnx.NodeProto], opset: int = 17, dtype: int = FLOAT, **more: Any) -> onnx.ModelProto:
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    graph = helper.make_graph(nodes, "g", [value("x", dtype)], [value("y", dtype)])
    return helper.make_model(graph, **{"opset_imports": imports, "ir_version": 8, **more})


def run(model: onnx.ModelProto, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    result: np.ndarray[Any, Any] = session.run(None, {"x": x})[0]
    return result


X = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)


def test_a_model_without_our_operators_comes_back_as_it_was() -> None:
    model = make_model([helper.make_node("Relu", ["x"], ["y"])], opset=11, ir_version=6)
    assert add_portable_functions(model) == model


def test_the_given_model_is_not_changed() -> None:
    model = make_model([block_node("x", "y")])
    before = model.SerializeToString(deterministic=True)
    result = add_portable_functions(model)
    assert model.SerializeToString(deterministic=True) == before
    assert [function.name for function in result.functions] == [MX]


@pytest.mark.parametrize("opset", [13, 17, 21])
def test_the_opset_stays_and_what_functions_need_is_added(opset: int) -> None:
    model = make_model([block_node("x", "y")], opset, opset_imports=[helper.make_opsetid("", opset)], ir_version=6)
    result = add_portable_functions(model)
    assert {entry.domain: entry.version for entry in result.opset_import} == {"": opset, DOMAIN: 1}
    assert [entry.version for entry in result.functions[0].opset_import] == [opset]
    assert result.ir_version == 9
    assert add_portable_functions(make_model([block_node("x", "y")], ir_version=10)).ir_version == 10


def test_doing_it_again_changes_nothing_and_replaces_what_is_stale() -> None:
    once = add_portable_functions(make_model([block_node("x", "y")]))
    assert add_portable_functions(once) == once
    stale = onnx.ModelProto()
    stale.CopyFrom(once)
    del stale.functions[0].node[1:]
    stale.functions.append(helper.make_function("mine", MX, ["x"], ["y"], [], [helper.make_opsetid("", 17)]))
    mended = add_portable_functions(stale)
    assert [(function.domain, function.name) for function in mended.functions] == [("mine", MX), (DOMAIN, MX)]
    assert mended.functions[1] == once.functions[0]


def test_several_nodes_with_their_own_attributes_share_a_function() -> None:
    nodes = [
        block_node("x", "a", element_dtype="fp8_e4m3", scale_rule="rceil"),
        block_node("a", "b", element_dtype="fp4_e2m1", axis=0),
        block_node("b", "y", BFP, bfp_method="to_bfp_prime", bit_width=13, block_size=16),
    ]
    model = add_portable_functions(make_model(nodes))
    assert [function.name for function in model.functions] == [MX, BFP]
    expected = quantize_dequantize(X, "mxfp8_e4m3", 1, scale_rule="rceil")
    expected = quantize_dequantize(expected, "mxfp4_e2m1", 0)
    assert same(run(model, X), quantize_dequantize(expected, "mx6", 1)).all()


def if_model(opset: int, dtype: int = FLOAT) -> onnx.ModelProto:
    """An If whose branches hold our operators."""
    branches = {}
    for field, op_type, y in (("then_branch", MX, "a"), ("else_branch", BFP, "b")):
        branches[field] = helper.make_graph([block_node("x", y, op_type)], field, [], [value(y, dtype)])
    count = helper.make_node("Shape", ["x"], ["shape"])
    is_any = helper.make_node("Cast", ["rows"], ["is_any"], to=TensorProto.BOOL)
    rows = helper.make_node("Slice", ["shape", "zero", "one"], ["rows"])
    model = make_model([count, rows, is_any, helper.make_node("If", ["is_any"], ["y"], **branches)], opset, dtype)
    model.graph.initializer.extend(
        helper.make_tensor(n, TensorProto.INT64, [1], [i]) for i, n in enumerate(("zero", "one"))
    )
    return model


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("dtype", [FLOAT, FLOAT16])
def test_nodes_in_branches_are_found(opset: int, dtype: int) -> None:
    model = add_portable_functions(if_model(opset, dtype))
    assert [function.name for function in model.functions] == [MX, BFP]
    x = X.astype(helper.tensor_dtype_to_np_dtype(dtype))
    assert same(run(model, x), quantize_dequantize(x, "mxint8", 1)).all()


def function_model(opset: int) -> onnx.ModelProto:
    """A function of somebody else's that calls ours, with an attribute handed on."""
    inner = block_node("x", "y")
    inner.attribute.append(
        onnx.AttributeProto(name="element_dtype", ref_attr_name="kind", type=onnx.AttributeProto.STRING)
    )
    imports = [helper.make_opsetid("", opset)]
    wrapper = helper.make_function("mine", "Wrapped", ["x"], ["y"], [inner], imports, ["kind"])
    node = helper.make_node("Wrapped", ["x"], ["y"], domain="mine", kind="fp6_e3m2")
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)]
    return make_model([node], opset, opset_imports=imports, functions=[wrapper])


def test_nodes_in_other_functions_are_found_and_may_pass_attributes_on() -> None:
    model = add_portable_functions(function_model(17))
    assert [function.name for function in model.functions] == ["Wrapped", MX]
    assert same(run(model, X), quantize_dequantize(X, "mxfp6_e3m2", 1)).all()
    with pytest.raises(ModelError, match="'x', an input of node 'y_node'.*not known; convert the model to opset 15"):
        add_portable_functions(function_model(14))


def test_float16_in_opset_13_is_followed_through_our_own_nodes() -> None:
    nodes = [
        block_node("x", "a"),
        helper.make_node("Relu", ["a"], ["b"]),
        block_node("b", "c", BFP),
        block_node("c", "y", element_dtype="fp4_e2m1"),
    ]
    model = add_portable_functions(make_model(nodes, 13, FLOAT16))
    onnx.checker.check_model(model)
    assert sum(node.op_type == "Cast" for node in model.graph.node) == 6
    x = X.astype(np.float16)
    expected = np.maximum(quantize_dequantize(x, "mxint8", 1), np.float16(0))
    expected = quantize_dequantize(quantize_dequantize(expected, "bfp16", 1), "mxfp4_e2m1", 1)
    assert same(run(model, x), expected).all()


MYSTERY = helper.make_node("Mystery", ["x"], ["a"], domain="mine")


@pytest.mark.parametrize(
    ("nodes", "opset", "dtype", "message"),
    [
        ([block_node("x", "y")], 12, FLOAT, "opset 12.*13 or later"),
        ([block_node("x", "y", element_dtype="int9")], 17, FLOAT, r"'y_node' \(MX.*'element_dtype'.*'int9'.*int8sym"),
        ([block_node("x", "y", BFP, bit_width=8)], 17, FLOAT, "'y_node'.*'bit_width'.*8.*10..30"),
        (
            [block_node("x", "y", BFP, bfp_method="to_bfp_prime", block_size=16, sub_block_size=3)],
            17,
            FLOAT,
            "'y_node'.*'sub_block_size'.*3 is not legal.*block_size, which is 16",
        ),
        ([block_node("x", "y", block_size=2**17, scale_rule="mse")], 17, FLOAT, "'y_node'.*131072.*at most 65536"),
        (
            [block_node("x", "y", BFP, scale_rule="mse", use_compiler_version_cpu_kernel=1)],
            17,
            FLOAT,
            "'y_node'.*floor",
        ),
        ([MYSTERY, block_node("a", "y")], 13, FLOAT, "element type of 'a', an input of node 'y_node'.*opset 15"),
        ([block_node("x", "y")], 13, TensorProto.DOUBLE, "'y_node'.*DOUBLE, expected FLOAT or FLOAT16"),
    ],
    ids=["opset", "choice", "range", "sub_blocks", "mse", "carry", "unknown_type", "wrong_type"],
)
def test_what_cannot_be_done_is_an_error_that_names_the_node(
    nodes: list[onnx.NodeProto], opset: int, dtype: int, message: str
) -> None:
    domains = {"": opset, DOMAIN: 1, "mine": 1}
    imports = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    with pytest.raises(ModelError, match=message):
        add_portable_functions(make_model(nodes, opset, dtype, opset_imports=imports))
