"""The block operators as functions of ordinary ONNX operators give the values of the reference, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from golden import cases, quantizer, quantizer_names, same
from onnx import TensorProto, helper, numpy_helper

from quark.formats.arrays import array_kind
from quark.formats.block import BlockQuantizer, quantize_dequantize_blocks
from quark.formats.catalog import BLOCK_FORMATS
from quark.formats.spec import BlockFormat, NonFinite, Rounding, ScaleRule
from quark.ops.onnx_nodes import all_nodes, make_block_node
from quark.ops.portable_functions import add_portable_functions
from quark.ops.schema import DOMAIN, quantizer_of

Array = np.ndarray[Any, Any]

MX, BFP = "MXQuantizeDequantize", "BFPQuantizeDequantize"
FORMATS = {str(fmt): fmt for fmt in BLOCK_FORMATS}

# n along the block axis: shorter than a block, one, several, and a ragged last one
SHAPES_AND_AXES = [((70,), 0), ((2, 33, 5), 1), ((3, 64), -1), ((2, 3, 40, 1), -2), ((1, 1), 0), ((), 0)]


def block_model(node: onnx.NodeProto, opset: int, dtype: int = TensorProto.FLOAT, shape: Any = None) -> onnx.ModelProto:
    x, y = (helper.make_tensor_value_info(name, dtype, shape) for name in ("x", "y"))
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=imports, ir_version=8)


def open_session(model: onnx.ModelProto, **settings: Any) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    for name, value in settings.items():
        setattr(options, name, value)
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def runtime_takes(opset: int) -> bool:
    try:
        open_session(block_model(helper.make_node("Identity", ["x"], ["y"]), opset))
    except Exception:
        return False
    return True


SUPPORTED = [opset for opset in range(13, 27) if runtime_takes(opset)]


def portable_session(node: onnx.NodeProto, opset: int, **where: Any) -> onnxruntime.InferenceSession:
    return open_session(add_portable_functions(block_model(node, opset, **where)))


def reference(x: Array, quantizer: BlockQuantizer, axis: int) -> Array:
    return quantize_dequantize_blocks(array_kind(x), x, axis % max(x.ndim, 1), quantizer)


def assert_same(actual: Array, expected: Array, x: Array, context: object = "") -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), context
    wrong = ~same(actual, expected)
    assert not wrong.any(), (
        f"{context}: {wrong.sum()} of {wrong.size}, first {x[wrong][0]!r} gave {actual[wrong][0]!r}, "
        f"expected {expected[wrong][0]!r}"
    )


def hard_values(rng: np.random.Generator, shape: tuple[int, ...], nonfinite: bool = True) -> Array:
    """All magnitudes of float32, its subnormals and limits, ties, neighbours of powers of two and NaN, in runs that
    share a magnitude so that blocks have something to lose."""
    count = int(np.prod(shape))
    kind = rng.integers(0, 6)
    if kind == 0:
        bits = rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32)
        x = np.where(np.isfinite(bits), bits, np.float32(1))
    elif kind == 1:
        x = rng.integers(-70, 71, count) * 0.25 * 2.0 ** rng.integers(-9, 9)
    elif kind == 2:
        x = 2.0 ** rng.integers(-4, 4, count) * rng.choice([1, 1.5, 1.75, 1.875, 1.9375, 1.984375, 1.9921875], count)
        x = (x.astype(np.float32).view(np.int32) + rng.integers(-1, 2, count, dtype=np.int32)).view(np.float32)
        x *= rng.choice(np.float32([-1, 1]), count)
    else:
        center = {3: -135, 4: 122, 5: 0}[int(kind)]
        x = rng.standard_normal(count) * 2.0 ** (center + rng.integers(-8, 4, count))
    limit = np.finfo(np.float32).max
    x = np.clip(x, -limit, limit).astype(np.float32).reshape(-1)
    if nonfinite and rng.random() < 0.4:
        x[rng.random(count) < 0.02] = rng.choice(np.float32([np.nan, np.inf, -np.inf]))
    return x.reshape(shape)


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("name", quantizer_names())
def test_golden_values(name: str, opset: int) -> None:
    session = portable_session(make_block_node(quantizer(name), -1, "x", "y"), opset)
    for case in cases(name):
        x = np.ascontiguousarray(np.moveaxis(case.x, case.axis, -1))
        actual = np.moveaxis(session.run(None, {"x": x})[0], -1, case.axis)
        assert not case.mismatches(actual).any(), case.name


@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_every_quantizer_matches_the_reference(fmt: BlockFormat, rule: ScaleRule) -> None:
    if rule not in fmt.scale_rules:
        pytest.skip("the format has a rule of its own")
    rng = np.random.default_rng([len(fmt.name), list(ScaleRule).index(rule)])
    for turn, (rounding, nonfinite) in enumerate(itertools.product(Rounding, NonFinite)):
        chosen = BlockQuantizer(fmt, rule, rounding, nonfinite)
        shape, axis = SHAPES_AND_AXES[turn]
        opset = int(rng.choice(SUPPORTED))
        session = portable_session(make_block_node(chosen, axis, "x", "y"), opset, shape=[None] * len(shape))
        for _ in range(20):
            x = hard_values(rng, shape)
            assert_same(session.run(None, {"x": x})[0], reference(x, chosen, axis), x, (chosen, axis, opset))


def random_attributes(rng: np.random.Generator) -> tuple[str, dict[str, Any]]:
    shared = {
        "block_size": int(rng.choice([1, 3, 8, 16, 33])),
        "rounding_mode": int(rng.integers(3)),
        "scale_rule": str(rng.choice([rule.value for rule in ScaleRule])),
        "nonfinite": str(rng.choice([policy.value for policy in NonFinite])),
    }
    if rng.random() < 0.2:
        return MX, {**shared, "element_dtype": str(rng.choice(["int8", "int8sym", "fp6_e2m3", "fp8_e5m2"]))}
    method = str(rng.choice(["to_bfp", "to_bfp_prime", "to_bfp_prime_shared"]))
    carries = method == "to_bfp" and bool(rng.random() < 0.3)
    return BFP, {
        **shared,
        "bfp_method": method,
        "bit_width": int(rng.integers(10, 31)),
        "sub_block_size": int(rng.choice([1, 2, 3, 5])),
        "sub_block_shift_bits": int(rng.integers(5)),
        "convert_to_bfloat_before_bfp": int(rng.integers(2)),
        "use_compiler_version_cpu_kernel": int(carries),
        **({"scale_rule": "floor"} if carries else {}),
    }


@pytest.mark.parametrize("seed", range(60))
def test_any_attributes_match_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    op_type, attributes = random_attributes(rng)
    shape, axis = SHAPES_AND_AXES[rng.integers(len(SHAPES_AND_AXES))]
    for name in list(attributes):
        if name != "use_compiler_version_cpu_kernel" and rng.random() < 0.2:
            del attributes[name]
    size = attributes.get("block_size", 8)
    if op_type == BFP and size % attributes.get("sub_block_size", 2):  # a sub-block divides its block
        attributes["sub_block_size"] = int(rng.choice([n for n in range(1, size + 1) if size % n == 0]))
    chosen, _, converts = quantizer_of(op_type, {**attributes, "axis": axis})
    node = helper.make_node(op_type, ["x"], ["y"], domain=DOMAIN, axis=axis, **attributes)
    dims = list(shape) if seed % 2 else [None] * len(shape)
    session = portable_session(node, int(rng.choice(SUPPORTED)), shape=dims)
    for _ in range(20):
        x = hard_values(rng, shape)
        with np.errstate(over="ignore", invalid="ignore"):
            first = x.astype(ml_dtypes.bfloat16).astype(np.float32) if converts else x
        assert_same(session.run(None, {"x": x})[0], reference(first, chosen, axis), x, attributes)


@pytest.mark.parametrize("op_type", [MX, BFP])
@pytest.mark.parametrize("shape", [(), (1,), (37,), (5, 40), (2, 40, 3)], ids=str)
def test_absent_attributes_have_the_operators_defaults(op_type: str, shape: tuple[int, ...]) -> None:
    session = portable_session(helper.make_node(op_type, ["x"], ["y"], domain=DOMAIN), 17)
    chosen, axis, _ = quantizer_of(op_type, {})
    rng = np.random.default_rng(0)
    for _ in range(10):
        x = hard_values(rng, shape)
        # the axis of absence, 1, is ignored below rank 2
        assert_same(session.run(None, {"x": x})[0], reference(x, chosen, axis if x.ndim > 1 else 0), x)


@pytest.mark.parametrize("opset", [13, 14, 15, 17, 21])
@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxint8", "mx6", "bfp16", "bfp16c"])
def test_float16_is_computed_in_float32_and_rounded_back(name: str, opset: int) -> None:
    chosen = BlockQuantizer(FORMATS[name], nonfinite=FORMATS[name].default_nonfinite)
    node = make_block_node(chosen, 1, "x", "y")
    session = portable_session(node, opset, dtype=TensorProto.FLOAT16, shape=["a", "b"])
    bits = np.random.default_rng(opset).integers(0, 2**16, (64, 50), dtype=np.uint16)
    x = bits.view(np.float16)
    with np.errstate(over="ignore"):
        assert_same(session.run(None, {"x": x})[0], reference(x, chosen, 1), x)


@pytest.mark.parametrize("block_size", [2**12 + 1, 2**16])
def test_mse_sums_large_blocks_in_the_fixed_order(block_size: int) -> None:
    chosen = BlockQuantizer(FORMATS["mxfp4_e2m1"].with_block_size(block_size), ScaleRule.MSE)
    x = np.random.default_rng(block_size).standard_normal((3, 2**16 + 5)).astype(np.float32)
    session = portable_session(make_block_node(chosen, 1, "x", "y"), 17)
    assert_same(session.run(None, {"x": x})[0], reference(x, chosen, 1), x)


@pytest.mark.parametrize("op_type", [MX, BFP])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), (2, 0, 3), (2, 3, 0)], ids=str)
def test_an_empty_tensor_stays_empty(op_type: str, shape: tuple[int, ...]) -> None:
    for opset in (14, 18, 21):
        session = portable_session(helper.make_node(op_type, ["x"], ["y"], domain=DOMAIN), opset)
        assert session.run(None, {"x": np.zeros(shape, np.float32)})[0].shape == shape


@pytest.mark.parametrize("axis", [2, 5, -3])
def test_an_axis_out_of_range_stops_the_runtime(axis: int) -> None:
    session = portable_session(helper.make_node(MX, ["x"], ["y"], domain=DOMAIN, axis=axis), 17)
    with pytest.raises(Exception, match="out of data bounds"):
        session.run(None, {"x": np.ones((2, 3), np.float32)})


@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [
        (MX, {"element_dtype": "fp8"}),
        (MX, {"rounding_mode": 3}),
        (MX, {"rounding_mode": -1}),
        (MX, {"scale_rule": "flor"}),
        (MX, {"nonfinite": ""}),
        (MX, {"block_size": 0}),
        (BFP, {"bfp_method": "bfp"}),
        (BFP, {"bit_width": 31}),
        (BFP, {"bit_width": 9}),
        (BFP, {"sub_block_size": 0}),
        (BFP, {"sub_block_shift_bits": 5}),
        (BFP, {"use_compiler_version_cpu_kernel": 1, "scale_rule": "mse"}),
        (BFP, {"block_size": 2**16 + 1, "scale_rule": "mse"}),
        (MX, {"block_size": 2**16 + 1, "scale_rule": "mse"}),
        (BFP, {"use_compiler_version_cpu_kernel": 1, "scale_rule": "ceil"}),
    ],
)
def test_an_illegal_attribute_edited_in_later_stops_the_runtime(op_type: str, attributes: dict[str, Any]) -> None:
    model = add_portable_functions(block_model(helper.make_node(op_type, ["x"], ["y"], domain=DOMAIN), 17))
    model.graph.node[0].attribute.extend(helper.make_attribute(*item) for item in attributes.items())
    with pytest.raises(Exception, match="out of data bounds"):
        open_session(model).run(None, {"x": np.ones((2, 3), np.float32)})


@pytest.mark.parametrize("opset", SUPPORTED)
def test_the_model_passes_the_checker(opset: int) -> None:
    for fmt in ("mxint8", "mx9"):
        node = make_block_node(BlockQuantizer(FORMATS[fmt]), 1, "x", "y")
        model = add_portable_functions(block_model(node, opset, shape=["n", 3]))
        onnx.checker.check_model(model)
        names = [name for function in model.functions for node in all_nodes(function.node) for name in node.output]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_what_attributes_decide_is_decided_when_the_session_is_made(fmt: BlockFormat, tmp_path: Any) -> None:
    file = str(tmp_path / "optimized.onnx")
    node = make_block_node(BlockQuantizer(fmt, nonfinite=fmt.default_nonfinite), 1, "x", "y")
    model = add_portable_functions(block_model(node, 17, shape=[2, 96, 4]))
    open_session(model, optimized_model_filepath=file)
    left = {node.op_type for node in onnx.load(file).graph.node}
    assert not left & {"If", "TfIdfVectorizer", "Pad", "Slice", "Shape", "Identity"}


@pytest.mark.parametrize("shape", [(4, 64), (4, 70)], ids=str)
@pytest.mark.parametrize("rule", [ScaleRule.FLOOR, ScaleRule.MSE])
@pytest.mark.parametrize("name", ["mxint8", "mxfp4_e2m1", "mx9", "bfp16"])
def test_a_constant_is_quantized_when_the_session_is_made(
    name: str, rule: ScaleRule, shape: tuple[int, ...], tmp_path: Any
) -> None:
    file = str(tmp_path / "optimized.onnx")
    x = hard_values(np.random.default_rng(5), shape, nonfinite=False)
    chosen = BlockQuantizer(FORMATS[name], rule)
    model = block_model(make_block_node(chosen, 1, "weight", "y"), 17, shape=shape)
    del model.graph.input[:]
    model.graph.initializer.append(numpy_helper.from_array(x, "weight"))
    session = open_session(add_portable_functions(model), optimized_model_filepath=file)
    assert_same(session.run(None, {})[0], reference(x, chosen, 1), x)
    assert not onnx.load(file).graph.node


# Functions for one choice of attributes

MANY_NODES = 70  # more than any function with fixed attributes has, fewer than those for all attributes

# shape as the model states it, shape of the data, axis: one element, one short block, whole blocks, a ragged last one
CASES: list[tuple[list[Any], tuple[int, ...], int]] = [
    (["n", 96, "h", "w"], (2, 96, 3, 5), 1),
    (["n", 40, 4, 4], (1, 40, 4, 4), 1),
    (["n", 3, None], (2, 3, 7), 1),
    (["n", 70], (3, 70), -1),
    (["n", 1], (2, 1), 1),
    ([33, "n"], (33, 9), 0),
    (["n", 50, 6], (2, 50, 6), -2),
    (["n", 16, "h"], (0, 16, 4), 1),
    (["n", 16, "h"], (2, 16, 0), 1),
]


def is_fixed(model: onnx.ModelProto) -> bool:
    return all(len(function.node) < MANY_NODES for function in model.functions)


def fixed_session(node: onnx.NodeProto, opset: int, shape: list[Any]) -> Any:
    model = add_portable_functions(block_model(node, opset, shape=shape))
    assert is_fixed(model)
    onnx.checker.check_model(model)
    return open_session(model)


def supported(fmt: BlockFormat, rule: ScaleRule, nonfinite: NonFinite) -> bool:
    if rule is ScaleRule.MSE or fmt.carry or rule not in fmt.scale_rules:
        return False
    if fmt.scale is not None:
        return nonfinite is NonFinite.BLOCK_NAN
    return rule is ScaleRule.FLOOR or fmt.element.grid.max_exponent > 0


@pytest.mark.parametrize("fmt", BLOCK_FORMATS, ids=str)
def test_fixed_attributes_match_the_reference(fmt: BlockFormat) -> None:
    rng = np.random.default_rng(len(fmt.name))
    count = 0
    for turn, (rule, nonfinite) in enumerate(itertools.product(ScaleRule, NonFinite)):
        if not supported(fmt, rule, nonfinite) or (fmt.scale is not None and not fmt.has_tensor_scale):
            continue
        chosen = BlockQuantizer(fmt, rule, Rounding.HALF_EVEN, nonfinite)
        for stated, shape, axis in CASES[turn % 3 :: 3]:
            session = fixed_session(make_block_node(chosen, axis, "x", "y"), (15, 17, 21)[turn % 3], stated)
            for _ in range(20):
                x = hard_values(rng, shape)
                assert_same(session.run(None, {"x": x})[0], reference(x, chosen, axis), x, (chosen, stated, axis))
                count += 1
    assert count or fmt.carry or (fmt.scale is not None and not fmt.has_tensor_scale)


@pytest.mark.parametrize("name", ["mxint8", "mxfp8_e4m3", "mxfp4_e2m1", "mx6", "bfp16", "nvfp4"])
def test_fixed_attributes_on_every_shape(name: str) -> None:
    fmt, rng = FORMATS[name], np.random.default_rng(7)
    chosen = BlockQuantizer(fmt, nonfinite=fmt.default_nonfinite)
    for stated, shape, axis in CASES:
        session = fixed_session(make_block_node(chosen, axis, "x", "y"), 17, stated)
        for _ in range(10):
            x = hard_values(rng, shape)
            assert_same(session.run(None, {"x": x})[0], reference(x, chosen, axis), x, (chosen, stated, axis))


@pytest.mark.parametrize("name", ["mxint8", "mxfp4_e2m1", "mx6", "bfp16", "nvfp4"])
def test_specials_limits_and_zeros(name: str) -> None:
    fmt = FORMATS[name]
    chosen = BlockQuantizer(fmt, nonfinite=fmt.default_nonfinite)
    session = fixed_session(make_block_node(chosen, 1, "x", "y"), 17, ["n", 64])
    limits = np.float32([0, -0.0, np.inf, -np.inf, np.nan, 3.4028235e38, -3.4028235e38, 1e-45, -1e-45, 1.1754944e-38])
    x = np.zeros((len(limits) * 2, 64), np.float32)
    for row, value in enumerate(limits):
        x[2 * row, 5] = value
        x[2 * row + 1] = np.where(np.arange(64) == 40, value, np.linspace(-3, 3, 64))
    for rows in (x, x[:2], x[10:12]):
        assert_same(session.run(None, {"x": rows})[0], reference(rows, chosen, 1), rows, name)


def test_rounding_to_bfloat16_first() -> None:
    chosen = BlockQuantizer(FORMATS["mx9"], nonfinite=FORMATS["mx9"].default_nonfinite)
    session = fixed_session(make_block_node(chosen, 1, "x", "y", convert_to_bfloat=True), 17, ["n", 48, 3])
    x = hard_values(np.random.default_rng(3), (4, 48, 3), nonfinite=False)
    with np.errstate(over="ignore"):
        rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_same(session.run(None, {"x": x})[0], reference(rounded, chosen, 1), x)


def test_axes_of_several_lengths_and_ranks_share_a_function() -> None:
    fmt = FORMATS["mxfp6_e2m3"]
    nodes = [make_block_node(BlockQuantizer(fmt), 1, name, f"{name}_y") for name in ("a", "b")]
    shapes = {"a": ("n", 80, 2), "b": ("n", 24)}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, None) for name in shapes]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    model = add_portable_functions(
        helper.make_model(helper.make_graph(nodes, "g", inputs, outputs), opset_imports=imports, ir_version=8)
    )
    assert is_fixed(model)
    rng = np.random.default_rng(11)
    a, b = hard_values(rng, (3, 80, 2)), hard_values(rng, (3, 24))
    for found, x in zip(open_session(model).run(None, {"a": a, "b": b}), (a, b), strict=True):
        assert_same(found, reference(x, BlockQuantizer(fmt), 1), x)


@pytest.mark.parametrize(
    ("shape", "dtype", "opset", "options"),
    [
        (["n", None], TensorProto.FLOAT, 17, {}),
        (None, TensorProto.FLOAT, 17, {}),
        ([40], TensorProto.FLOAT, 17, {}),
        (["n", 40], TensorProto.FLOAT16, 17, {}),
        (["n", 40], TensorProto.FLOAT, 14, {}),
        (["n", 2**17], TensorProto.FLOAT, 17, {}),
        (["n", 40], TensorProto.FLOAT, 17, {"scale_rule": ScaleRule.MSE}),
        (["n", 40], TensorProto.FLOAT, 17, {"rounding": Rounding.HALF_UP}),
    ],
)
def test_other_models_get_functions_for_any_attributes(shape: Any, dtype: int, opset: int, options: Any) -> None:
    node = make_block_node(BlockQuantizer(FORMATS["mxint8"], **options), 0 if shape == [40] else 1, "x", "y")
    assert not is_fixed(add_portable_functions(block_model(node, opset, dtype=dtype, shape=shape)))


def test_nodes_with_different_attributes_get_a_function_for_any() -> None:
    formats = ("mxint8", "mxfp4_e2m1")
    nodes = [make_block_node(BlockQuantizer(FORMATS[n]), 1, *io) for n, io in zip(formats, ("xa", "ay"), strict=True)]
    model = block_model(nodes[0], 17, shape=["n", 40])
    model.graph.node.append(nodes[1])
    model.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["n", 40]))
    model = add_portable_functions(model)
    assert not is_fixed(model)
