"""The compiled operators as ONNX Runtime sees them: defaults, types, threads, errors. Run on the oldest runtime too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from backends import block_model, by_native_entry, by_native_operator, by_numpy, node_model, open_session
from golden import cases, quantizer, quantizer_names, same
from onnx import TensorProto, helper

from quark.errors import QuarkError
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS, BLOCK_INT8
from quark.formats.native import instruction_set
from quark.formats.spec import BlockFormat, NonFinite, Rounding, ScaleRule
from quark.ops.schema import OPERATORS, quantizer_of

Array = np.ndarray[Any, Any]

FLOAT = TensorProto.FLOAT


def run_node(op_type: str, x: Array, **attributes: object) -> Array:
    node = helper.make_node(op_type, ["x"], ["y"], "the_node", domain="com.amd.quark", **attributes)
    dtype = helper.np_dtype_to_tensor_dtype(x.dtype)
    return open_session(node_model([node], x.ndim, dtype), native=True).run(None, {"x": x})[0]


def test_this_is_the_runtime_that_was_meant() -> None:
    expected = os.environ.get("QUARK_EXPECT_ONNXRUNTIME")
    assert expected in (None, onnxruntime.__version__)


@pytest.mark.parametrize("name", quantizer_names())
def test_golden_values(name: str) -> None:
    for case in cases(name):
        assert not case.mismatches(by_native_operator(case.x, quantizer(name), case.axis)).any(), case.name


def test_defaults_of_absent_attributes() -> None:
    x = np.random.default_rng(0).standard_normal((2, 70, 3)).astype(np.float32) * 4
    x[0, 0, 0] = np.nan
    mx = BlockQuantizer(BlockFormat("mx", BLOCK_INT8, 32), rounding=Rounding.HALF_AWAY)
    assert same(run_node("MXQuantizeDequantize", x), by_numpy(x, mx, 1)).all()
    bfp16 = next(fmt for fmt in BLOCK_FORMATS if fmt.name == "bfp16")
    bfp = BlockQuantizer(bfp16, rounding=Rounding.HALF_AWAY, nonfinite=NonFinite.PASSTHROUGH)
    assert same(run_node("BFPQuantizeDequantize", x), by_numpy(x, bfp, 1)).all()


@pytest.mark.parametrize("op_type", ["MXQuantizeDequantize", "BFPQuantizeDequantize"])
def test_every_legal_attribute_value_does_what_the_schema_says(op_type: str) -> None:
    x = np.random.default_rng(1).standard_normal((3, 40, 5)).astype(np.float32)
    for attribute in OPERATORS[op_type].attributes:
        values = attribute.choices or {"axis": (-3, -1, 0, 2)}.get(attribute.name, ())
        values = values or tuple(v for v in (attribute.minimum, attribute.maximum, 3, 7) if v is not None)
        for value in (v for v in values if attribute.allows(v)):
            for method in ("to_bfp", "to_bfp_prime") if op_type.startswith("BFP") else (None,):
                attributes: dict[str, Any] = {} if method is None else {"bfp_method": method}
                attributes[attribute.name] = value
                if attribute.name == "sub_block_size":  # which divides the block
                    attributes["block_size"] = 2 * value
                elif attribute.name == "block_size" and method is not None:
                    attributes["sub_block_size"] = min(value, 2**31 - 1)
                expected, axis, to_bfloat = quantizer_of(op_type, attributes)
                source = to_bfloat16(x) if to_bfloat else x
                actual = run_node(op_type, x, **attributes)
                assert same(actual, by_numpy(source, expected, axis)).all(), attributes


def to_bfloat16(x: Array) -> Array:
    import ml_dtypes

    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def test_convert_to_bfloat_leaves_the_input_alone() -> None:
    x = np.random.default_rng(2).standard_normal((2, 64)).astype(np.float32)
    nodes = [
        helper.make_node("BFPQuantizeDequantize", ["x"], ["q"], domain="com.amd.quark", convert_to_bfloat_before_bfp=1),
        helper.make_node("Sub", ["x", "x0"], ["change"]),
        helper.make_node("Mul", ["q", "zero"], ["nothing"]),
        helper.make_node("Add", ["change", "nothing"], ["y"]),
    ]
    model = node_model(nodes, 2, FLOAT)
    model.graph.initializer.extend(
        [onnx.numpy_helper.from_array(x, "x0"), onnx.numpy_helper.from_array(np.float32(0), "zero")]
    )
    assert (open_session(model, native=True).run(None, {"x": x})[0] == 0).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(257, 1031), (1, 256, 56, 56), (3, 7, 5, 3), (1031,)], ids=str)
def test_threads_do_not_change_a_bit(shape: tuple[int, ...], threads: int) -> None:
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    for fmt in BLOCK_FORMATS:
        for axis in {0, len(shape) - 1, min(1, len(shape) - 1)}:
            session = open_session(block_model(BlockQuantizer(fmt), axis, x.ndim, FLOAT), native=True, threads=threads)
            assert same(session.run(None, {"x": x})[0], by_numpy(x, BlockQuantizer(fmt), axis)).all(), (fmt.name, axis)


def test_large_tensors_are_streamed_exactly() -> None:
    x = np.random.default_rng(4).standard_normal((2049, 4100)).astype(np.float32)
    for fmt in BLOCK_FORMATS:
        for axis in (0, 1):
            assert same(by_native_entry(x, BlockQuantizer(fmt), axis), by_numpy(x, BlockQuantizer(fmt), axis)).all()


def test_subnormals_survive_a_session_that_flushes_them() -> None:
    x = (np.random.default_rng(5).standard_normal((4, 64)) * 1e-39).astype(np.float32)
    fmt = next(fmt for fmt in BLOCK_FORMATS if fmt.name == "mxint8")
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.set_denormal_as_zero", "1")
    from quark.ops.library import get_library_path

    options.register_custom_ops_library(get_library_path())
    model = block_model(BlockQuantizer(fmt), 1, 2, FLOAT)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    y = session.run(None, {"x": x})[0]
    assert np.any(y != 0)
    assert same(y, by_numpy(x, BlockQuantizer(fmt), 1)).all()


def run_with_instructions(program: str, instructions: str) -> None:
    """Run a program that imports the test's helpers, on the compiled code for that instruction set or the next best."""
    support = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support")
    program = f"import sys; sys.path.insert(0, sys.argv[1])\n{program}print(instruction_set())\n"
    environment = {**os.environ, "QUARK_INSTRUCTION_SET": instructions}
    result = subprocess.run(
        [sys.executable, "-c", program, support], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    order = ["baseline", "avx2", "avx512"]
    chosen = result.stdout.strip()
    assert chosen in order[: order.index(instructions) + 1]
    if instruction_set() == "avx512":
        assert chosen == instructions


@pytest.mark.parametrize("instructions", ["avx512", "avx2", "baseline"])
def test_every_instruction_set_gives_the_same_bits(instructions: str) -> None:
    program = (
        "import numpy as np\n"
        "from backends import by_native_entry, by_numpy\n"
        "from golden import cases, quantizer, quantizer_names\n"
        "from quark.formats.native import instruction_set\n"
        "for name in quantizer_names():\n"
        "    for case in cases(name):\n"
        "        for x in (case.x, np.asfortranarray(case.x)):\n"
        "            y = by_native_entry(x, quantizer(name), case.axis)\n"
        "            assert not case.mismatches(y).any(), (name, case.name)\n"
    )
    run_with_instructions(program, instructions)


# Rows long enough to be quantized many blocks at a time, which the golden cases are not. A row has one magnitude: the
# first are below the smallest subnormal, the last Inf.
MAGNITUDES = """
from itertools import product
import numpy as np
from backends import by_native_entry, by_numpy
from golden import same
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS
from quark.formats.native import instruction_set
from quark.formats.spec import NonFinite, Rounding, ScaleRule

random = np.random.default_rng(9)
x = random.standard_normal((280, 1056), dtype=np.float32)
x[:, ::3] = np.round(x[:, ::3] * 8) / 8  # ties
x[:, 512:544] = 0
with np.errstate(over="ignore"):
    x = np.ldexp(x, np.arange(-151, 129)[:, None]).astype(np.float32)
x[140, 100], x[141, 700], x[142, 3] = np.nan, np.inf, -np.inf
rules = (ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN, ScaleRule.RCEIL)
for fmt, rounding, nonfinite in product(BLOCK_FORMATS, Rounding, NonFinite):
    for rule in set(rules) & set(fmt.scale_rules) if rounding is Rounding.HALF_EVEN else (ScaleRule.FLOOR,):
        quantizer = BlockQuantizer(fmt, rule, rounding, nonfinite, 2.0**-9 if fmt.has_tensor_scale else None)
        with np.errstate(all="ignore"):
            expected = by_numpy(x, quantizer, 1)
        columns = by_native_entry(np.ascontiguousarray(x.T), quantizer, 0)
        for y in (by_native_entry(x, quantizer, 1), columns.T):
            assert same(y, expected).all(), (quantizer, np.argwhere(~same(y, expected))[0])
"""


# Neg makes a tensor that nobody else reads, so that ONNX Runtime lets the operator's output take its memory.
IN_PLACE = """
from itertools import product
import numpy as np
from backends import by_numpy, node_model, open_session
from golden import same
from onnx import helper
from quark.formats.block import BlockQuantizer
from quark.formats.catalog import BLOCK_FORMATS
from quark.formats.native import instruction_set
from quark.formats.spec import ScaleRule
from quark.ops.onnx_nodes import make_block_node

random = np.random.default_rng(11)
shapes = [((2, 40, 7, 7), 1), ((1, 35, 5, 13), -3), ((33, 70), 1), ((33, 70), 0), ((3, 48, 3), 1), ((1, 64, 8, 9), 1)]
for fmt, (shape, axis) in product(BLOCK_FORMATS, shapes):
    x = random.standard_normal(shape, dtype=np.float32)
    x[0, 1] = np.nan
    for rule in {ScaleRule.FLOOR, ScaleRule.MSE} & set(fmt.scale_rules):
        quantizer = BlockQuantizer(fmt, rule)
        nodes = [
            helper.make_node("Neg", ["x"], ["n"]),
            make_block_node(quantizer, axis, "n", "q"),
            helper.make_node("Neg", ["q"], ["y"]),
        ]
        y = open_session(node_model(nodes, x.ndim, 1), native=True).run(None, {"x": x})[0]
        assert same(y, -by_numpy(-x, quantizer, axis)).all(), (quantizer, shape, axis)
"""


@pytest.mark.parametrize("instructions", ["avx512", "avx2", "baseline"])
def test_an_output_may_take_the_place_of_its_input(instructions: str) -> None:
    run_with_instructions(IN_PLACE, instructions)


@pytest.mark.parametrize("instructions", ["avx512", "avx2", "baseline"])
def test_blocks_of_every_magnitude(instructions: str) -> None:
    run_with_instructions(MAGNITUDES, instructions)


@pytest.mark.parametrize(
    ("op_type", "attributes", "message"),
    [
        ("MXQuantizeDequantize", {"element_dtype": "fp9"}, "'element_dtype' is 'fp9'; expected one of fp8_e5m2"),
        ("MXQuantizeDequantize", {"element_dtype": "INT8"}, "'element_dtype' is 'INT8'"),
        ("MXQuantizeDequantize", {"element_dtype": "x" * 5000}, "'element_dtype' is 'xxx"),
        ("MXQuantizeDequantize", {"element_dtype": ""}, "'element_dtype' is ''"),
        ("MXQuantizeDequantize", {"element_dtype": b"int8\0sym"}, r"'element_dtype' is 'int8\x00sym'"),
        ("MXQuantizeDequantize", {"element_dtype": b"\xff\xfe"}, r"'element_dtype' is '\xff\xfe'"),
        ("MXQuantizeDequantize", {"element_dtype": 3}, "'element_dtype' has the wrong type"),
        ("MXQuantizeDequantize", {"block_size": 0}, "'block_size' is 0; expected 1 or more"),
        ("MXQuantizeDequantize", {"block_size": -32}, "'block_size' is -32"),
        ("MXQuantizeDequantize", {"block_size": "32"}, "'block_size' has the wrong type"),
        ("MXQuantizeDequantize", {"block_size": [32]}, "'block_size' has the wrong type"),
        ("MXQuantizeDequantize", {"rounding_mode": 3}, "'rounding_mode' is 3; expected 0..2"),
        ("MXQuantizeDequantize", {"axis": 2}, "'axis' is 2; expected -2..1"),
        ("MXQuantizeDequantize", {"axis": -3}, "'axis' is -3; expected -2..1"),
        ("MXQuantizeDequantize", {"axis": 2**62}, "'axis' is 4611686018427387904"),
        ("MXQuantizeDequantize", {"axis": 0.5}, "'axis' has the wrong type"),
        ("MXQuantizeDequantize", {"scale_rule": "round"}, "expected one of floor, ceil, even, rceil, mse"),
        ("MXQuantizeDequantize", {"nonfinite": "keep"}, "expected one of block_nan, passthrough"),
        ("BFPQuantizeDequantize", {"bfp_method": "to_mx"}, "expected one of to_bfp, to_bfp_prime"),
        ("BFPQuantizeDequantize", {"bit_width": 9}, "'bit_width' is 9; expected 10..30"),
        ("BFPQuantizeDequantize", {"bit_width": 31}, "'bit_width' is 31"),
        ("BFPQuantizeDequantize", {"sub_block_size": 0}, "'sub_block_size' is 0"),
        ("BFPQuantizeDequantize", {"sub_block_shift_bits": 5}, "'sub_block_shift_bits' is 5; expected 0..4"),
        ("BFPQuantizeDequantize", {"convert_to_bfloat_before_bfp": 2}, "'convert_to_bfloat_before_bfp' is 2"),
        ("BFPQuantizeDequantize", {"use_compiler_version_cpu_kernel": -1}, "'use_compiler_version_cpu_kernel' is -1"),
        (
            "BFPQuantizeDequantize",
            {"use_compiler_version_cpu_kernel": 1, "scale_rule": "ceil"},
            "'scale_rule' must be 'floor'",
        ),
        (
            "BFPQuantizeDequantize",
            {"bfp_method": "to_bfp_prime", "block_size": 16, "sub_block_size": 3},
            "'sub_block_size' is 3; expected a divisor of block_size, which is 16",
        ),
        (
            "BFPQuantizeDequantize",
            {"bfp_method": "to_bfp_prime", "block_size": 2**31, "sub_block_size": 2**31},
            "a divisor of block_size, which is 2147483648, of at most 2147483647",
        ),
    ],
)
def test_wrong_attributes_are_errors(op_type: str, attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match="the_node") as caught:
        run_node(op_type, np.ones((2, 3), np.float32), **attributes)
    assert message in str(caught.value)
    assert op_type in str(caught.value)


def attribute_grid() -> Iterator[dict[str, Any]]:
    """Sizes, shifts, widths and methods of BFPQuantizeDequantize, legal and illegal together."""
    sizes = product((1, 8, 16, 24, 2**32), (0, 1, 2, 3, 8, 16, 17, 2**31))
    modes = product(("to_bfp", "to_bfp_prime", "to_bfp_prime_shared"), (0, 1), ("floor", "mse"))
    for number, ((block, sub), (method, carries, rule)) in enumerate(product(sizes, modes)):
        yield {
            "bfp_method": method,
            "block_size": block,
            "sub_block_size": sub,
            "use_compiler_version_cpu_kernel": carries,
            "scale_rule": rule,
            "sub_block_shift_bits": (0, 1, 4, 5)[number % 4],
            "bit_width": (9, 10, 13, 16, 30, 31)[number % 6],
            "rounding_mode": number % 3,
        }


def quantizer_or_none(op_type: str, attributes: dict[str, Any]) -> BlockQuantizer | None:
    """What the schema makes of the attributes; None if it refuses them."""
    try:
        return quantizer_of(op_type, attributes)[0]
    except QuarkError:
        return None


def test_the_operator_refuses_what_its_schema_refuses() -> None:
    """The portable function is checked by the schema: a file must not run with one and fail with the other."""
    x = np.random.default_rng(11).standard_normal((2, 40)).astype(np.float32)
    for attributes in attribute_grid():
        expected = quantizer_or_none("BFPQuantizeDequantize", attributes)
        if expected is None:
            with pytest.raises(Exception, match="the_node"):
                run_node("BFPQuantizeDequantize", x, **attributes)
        else:
            assert same(run_node("BFPQuantizeDequantize", x, **attributes), by_numpy(x, expected, 1)).all(), attributes


THREADS_PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <new>
#include "threads.h"

// Allocation number `failing` of the main thread fails, and all of its later ones.
static thread_local int64_t allocations = -1000000;
static int64_t failing = 0;

void* operator new(std::size_t size) {
  if (allocations++ >= failing) throw std::bad_alloc();
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main() {
  constexpr int64_t kWorkers = 6;
  for (failing = 0; failing < 2 * kWorkers; ++failing) {
    std::atomic<int> runs[kWorkers] = {};
    allocations = 0;
    quark::run_on_own_threads(kWorkers, [&](int64_t worker) { ++runs[worker]; });
    allocations = -1000000;
    for (const auto& each : runs) {
      if (each != 1) return 1;
    }
  }
  std::puts("all shares ran once");
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_a_thread_that_cannot_start_leaves_its_work_to_the_others(tmp_path: Path) -> None:
    """Memory runs out before the first thread, or after any number of them: every share runs, and nothing is ended."""
    source, program = tmp_path / "threads.cc", tmp_path / "threads"
    source.write_text(THREADS_PROGRAM)
    folder = Path(__file__).parents[2] / "csrc"
    command = ["c++", "-std=c++17", "-O1", "-pthread", f"-I{folder}", str(source), "-o", str(program), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, "all shares ran once\n"), result.stderr


def test_huge_block_sizes_are_one_block() -> None:
    x = np.random.default_rng(6).standard_normal((3, 50)).astype(np.float32)
    whole = BlockQuantizer(BlockFormat("mx", BLOCK_INT8, 50), rounding=Rounding.HALF_AWAY)
    assert same(run_node("MXQuantizeDequantize", x, block_size=2**63 - 1), by_numpy(x, whole, 1)).all()


def test_other_types_are_refused() -> None:
    with pytest.raises(Exception, match=r"[Tt]ype"):
        run_node("MXQuantizeDequantize", np.ones((2, 3), np.float64))


@pytest.mark.parametrize("block", [1, 2, 3, 7, 24, 100, 5000])
def test_long_and_odd_blocks(block: int) -> None:
    x = np.random.default_rng(7).standard_normal((3, 5003)).astype(np.float32)
    for fmt in BLOCK_FORMATS:
        for rule in (ScaleRule.FLOOR,) if fmt.carry else (ScaleRule.FLOOR, ScaleRule.MSE):
            chosen = BlockQuantizer(fmt.with_block_size(block), rule)
            for source in (x, x.astype(np.float16)):
                assert same(by_native_entry(source, chosen, 1), by_numpy(source, chosen, 1)).all(), (fmt.name, rule)


def unknown_rank_model(nodes: list[onnx.NodeProto], output_type: int = FLOAT) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", FLOAT, None)
    y = helper.make_tensor_value_info("y", output_type, None)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=imports, ir_version=8)


def test_a_tensor_of_unknown_rank_is_not_taken_for_a_scalar() -> None:
    x = np.random.default_rng(8).standard_normal((2, 35, 3)).astype(np.float32)
    quantize = helper.make_node("MXQuantizeDequantize", ["x"], ["q"], domain="com.amd.quark")
    shape = unknown_rank_model([quantize, helper.make_node("Shape", ["q"], ["y"])], TensorProto.INT64)
    assert open_session(shape, native=True).run(None, {"x": x})[0].tolist() == [2, 35, 3]
    turned = unknown_rank_model([quantize, helper.make_node("Transpose", ["q"], ["y"], perm=[2, 0, 1])])
    assert open_session(turned, native=True).run(None, {"x": x})[0].shape == (3, 2, 35)


def test_an_unknown_dimension_is_not_taken_for_minus_one() -> None:
    # a reshape by a computed size leaves a dimension without a number and without a name
    x = np.random.default_rng(8).standard_normal((4, 6)).astype(np.float32)
    nodes = [
        helper.make_node("Cast", ["half"], ["size"], to=TensorProto.INT64),
        helper.make_node("Reshape", ["x", "size"], ["r"]),
        helper.make_node("MXQuantizeDequantize", ["r"], ["q"], domain="com.amd.quark"),
        helper.make_node("MatMul", ["q", "w"], ["p"]),
        helper.make_node("Add", ["p", "r"], ["y"]),
    ]
    model = unknown_rank_model(nodes)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", FLOAT, [4, 6]))
    model.graph.input.append(helper.make_tensor_value_info("half", FLOAT, [2]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(3, dtype=np.float32), "w"))
    half = np.array([8, 3], np.float32)
    assert open_session(model, native=True).run(None, {"x": x, "half": half})[0].shape == (8, 3)


def test_extended_operators_on_unknown_rank() -> None:
    x = np.random.default_rng(9).standard_normal((2, 5)).astype(np.float32)
    model = unknown_rank_model(
        [
            helper.make_node("ExtendedQuantizeLinear", ["x", "s", "z"], ["q"], domain="com.amd.quark"),
            helper.make_node("ExtendedDequantizeLinear", ["q", "s", "z"], ["d"], domain="com.amd.quark"),
            helper.make_node("Transpose", ["d"], ["y"]),
        ]
    )
    model.graph.initializer.extend(
        [onnx.numpy_helper.from_array(np.float32(0.5), "s"), onnx.numpy_helper.from_array(np.int32(0), "z")]
    )
    assert np.array_equal(open_session(model, native=True).run(None, {"x": x})[0], np.rint(x * 2).T / 2)


def test_shapes_are_inferred() -> None:
    options = onnxruntime.SessionOptions()
    from quark.ops.library import get_library_path

    options.register_custom_ops_library(get_library_path())
    model = block_model(BlockQuantizer(BLOCK_FORMATS[0]), 1, 3, FLOAT)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert session.get_outputs()[0].shape == ["d0", "d1", "d2"]
    assert session.get_outputs()[0].type == "tensor(float)"
