"""Throw random shapes, parameters, attributes and bits at the compiled library; stop at the first surprise.

    python fuzz_operators.py [--seconds S] [--seed N] [--library FILE]

Shapes and values, special ones and strided arrays among them, go through the entry for numpy arrays and are compared
with the array implementation; attributes, inputs and types, most of them wrong, go through ONNX Runtime, which must
answer with a result or an error and never with the end of the process. A result of legal attributes is compared, too,
and so is that of several threads on one session. `make test-sanitized` runs this on a build with AddressSanitizer and
UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from quark.errors import QuarkError
from quark.formats import native
from quark.formats.arrays import array_kind
from quark.formats.block import BlockQuantizer, quantize_dequantize_blocks
from quark.formats.catalog import BLOCK_FORMATS
from quark.formats.spec import BlockFormat, NonFinite, Rounding, SubBlocks
from quark.ops.schema import quantizer_of

Array = np.ndarray[Any, Any]
Random = np.random.Generator

EXTENTS = [0, 1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 32, 33, 40, 64, 100]
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, 6e-8, 65504.0]
OPERATORS = ["MXQuantizeDequantize", "BFPQuantizeDequantize", "FloatScaleQuantizeDequantize"]
OPERATORS += ["ExtendedQuantizeLinear", "ExtendedDequantizeLinear"]
TYPES = [np.float32, np.float16, np.float64, np.int8, np.uint16, np.int32, np.int64, np.bool_, np.complex64]
BLOCKS = [1, 2, 3, 5, 7, 8, 13, 16, 24, 32, 33, 64, 100, 128, 1000, 5000]
NUMBERS = [0, 1, 2, 3, -1, 7, 8, 16, 32, 64, 1000, -(2**63), 2**63 - 1, 2**31, -(2**31), 2**32]
WORDS = ["", "int8", "fp8_e4m3", "fp4_e2m1", "floor", "mse", "to_bfp", "to_bfp_prime", "passthrough", "\x00", "é" * 300]
NAMES = ["axis", "block_size", "rounding_mode", "element_dtype", "scale_rule", "nonfinite", "bfp_method", "bit_width"]
NAMES += ["sub_block_size", "sub_block_shift_bits", "convert_to_bfloat_before_bfp", "use_compiler_version_cpu_kernel"]
NAMES += ["scale_dtype"]
TENSOR_SCALES = [0.0, 1e-45, 3e-41, 1e-5, 0.37, 1e20, 7e35]


def random_quantizer(rng: Random) -> BlockQuantizer:
    fmt: BlockFormat = BLOCK_FORMATS[rng.integers(len(BLOCK_FORMATS))]
    fmt = fmt.with_block_size(int(rng.choice(BLOCKS))) if rng.random() < 0.6 else fmt
    if fmt.sub_blocks is not None and rng.random() < 0.5:
        fmt = replace(fmt, sub_blocks=SubBlocks(int(rng.integers(1, 9)), int(rng.integers(0, 5))))
    rule = fmt.scale_rules[rng.integers(len(fmt.scale_rules))]
    scale = float(rng.choice(TENSOR_SCALES)) if fmt.has_tensor_scale and rng.random() < 0.5 else None
    return BlockQuantizer(fmt, rule, list(Rounding)[rng.integers(3)], list(NonFinite)[rng.integers(2)], scale)


def random_values(rng: Random, shape: tuple[int, ...]) -> Array:
    kind = rng.integers(6)
    x: Array
    if kind == 0:
        x = rng.standard_normal(shape)
    elif kind == 1:
        x = np.asarray(rng.integers(0, 2**32, shape, dtype=np.uint64)).astype(np.uint32).view(np.float32)
    elif kind == 2:
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-149, 128, shape)
    elif kind == 5:
        x = rng.choice(SPECIAL, shape)
    elif kind == 3:
        x = rng.integers(-20, 20, shape) * 0.125 * 2.0 ** rng.integers(-140, 120)
    else:
        x = (
            rng.choice([-1, 1], shape)
            * 2.0 ** rng.integers(-149, 128, shape)
            * (2 - 2.0 ** -rng.integers(1, 24, shape))
        )
    with np.errstate(all="ignore"):
        x = np.asarray(x, np.float32)
        return x.astype(np.float16) if rng.random() < 0.3 else x


def between_elements(x: Array) -> Array:
    """The same values one byte further on, where no element of the type should begin."""
    return np.ndarray(x.shape, x.dtype, b"\0" + x.tobytes(), offset=1)


def strided(rng: Random, x: Array) -> Array:
    """The same values, lying in memory in another order or with gaps between them."""
    if rng.random() < 0.5:
        return np.asfortranarray(x)
    wide = np.zeros((*x.shape, 3), x.dtype)
    wide[..., 1] = x
    return wide[..., 1]


def fuzz_entry(rng: Random) -> None:
    """One random array through the compiled code and through numpy."""
    shape = tuple(int(n) for n in rng.choice(EXTENTS, rng.integers(0, 5)))
    if np.prod(shape) > 100_000:
        return
    quantizer, x = random_quantizer(rng), random_values(rng, shape)
    x = between_elements(x) if rng.random() < 0.1 else x
    x = strided(rng, x) if rng.random() < 0.2 else x
    axis = int(rng.integers(0, max(1, len(shape))))
    actual = native.quantize_dequantize_native(x, axis, quantizer, threads=int(rng.integers(1, 4)))
    expected = quantize_dequantize_blocks(array_kind(x), x, axis, quantizer)
    is_same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    if not is_same.all():
        raise SystemExit(
            f"{quantizer} shape {shape} axis {axis} {x.dtype}: {x[~is_same][:3]} gave {actual[~is_same][:3]}"
        )


def random_attributes(rng: Random) -> dict[str, object]:
    makers: list[Callable[[], object]] = [
        lambda: int(rng.choice(np.array(NUMBERS, dtype=object))),
        lambda: int(rng.integers(0, 40)),
        lambda: str(rng.choice(np.array(WORDS, dtype=object))),
        lambda: float(rng.standard_normal()),
        lambda: [1, 2, 3],
    ]
    chosen = rng.choice(len(makers), p=[0.35, 0.35, 0.2, 0.05, 0.05])
    names = rng.choice(NAMES, rng.integers(0, 5), replace=False)
    return {str(name): makers[chosen]() for name in names}


def fuzz_operator(rng: Random, options: onnxruntime.SessionOptions) -> bool:
    """One node with random attributes on random tensors; True if it ran. Errors are fine, crashes are not."""
    op_type = str(rng.choice(OPERATORS, p=[0.25, 0.25, 0.2, 0.15, 0.15]))
    attributes = random_attributes(rng)
    feeds = random_feeds(rng, op_type)
    model = node_model(op_type, attributes, feeds)
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        result = session.run(None, feeds)[0]
    except Exception as error:  # ONNX Runtime has no common class for its errors
        if op_type not in str(error):
            raise SystemExit(f"an error that does not name the operator: {error}") from error
        return False
    scale = feeds.get("tensor_scale")
    check_result(op_type, attributes, feeds["x"], result, None if scale is None else float(scale.reshape(())))
    with ThreadPoolExecutor(3) as pool:
        for other in pool.map(lambda _: session.run(None, feeds)[0], range(3)):
            if other.tobytes() != result.tobytes():
                raise SystemExit(f"{op_type} {attributes}: another result in another thread")
    return True


def random_feeds(rng: Random, op_type: str) -> dict[str, Array]:
    """The inputs by name: mostly as many as the operator has, of the types that it takes; sometimes not."""
    shape = tuple(int(n) for n in rng.choice(EXTENTS[:8], rng.integers(0, 4)))
    feeds = {"x": random_values(rng, shape)}
    if op_type.startswith("Extended"):
        channels = (int(rng.choice([0, 1, 2, 5])),) if rng.random() < 0.5 else ()
        with np.errstate(over="ignore"):
            feeds["scale"] = random_values(rng, channels).astype(feeds["x"].dtype)
        codes = TYPES[rng.integers(3, 6)]
        feeds["zero_point"] = rng.integers(0, 3, channels).astype(codes)
        if op_type == "ExtendedDequantizeLinear":
            feeds["x"] = rng.integers(0, 100, shape).astype(codes)
    if op_type.startswith("FloatScale") and rng.random() < 0.5:
        feeds["tensor_scale"] = np.array(rng.choice([*TENSOR_SCALES, -1.0, np.nan, 1e37]), np.float32)
    for name in list(feeds):
        if rng.random() < 0.05:
            feeds[name] = np.zeros(feeds[name].shape, TYPES[rng.integers(len(TYPES))])
    if rng.random() < 0.05:
        feeds["more"] = np.zeros(2, np.float32)
    if len(feeds) > 1 and rng.random() < 0.1:
        del feeds[list(feeds)[-1]]
    return feeds


def node_model(op_type: str, attributes: dict[str, object], feeds: dict[str, Array]) -> bytes:
    """The model of one node; the output's type is what a right node would have."""
    output = {"ExtendedQuantizeLinear": "zero_point", "ExtendedDequantizeLinear": "scale"}.get(op_type, "x")
    node = helper.make_node(op_type, list(feeds), ["y"], domain="com.amd.quark", **attributes)
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    result = [helper.make_tensor_value_info("y", kinds.get(output, TensorProto.FLOAT), None)]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
    graph = helper.make_graph([node], "g", inputs, result)
    return bytes(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())


def check_result(
    op_type: str, attributes: dict[str, object], x: Array, result: Array, tensor_scale: float | None
) -> None:
    """That a node whose attributes the schema allows computes what the array implementation does."""
    try:
        quantizer, axis, is_rounded_first = quantizer_of(op_type, attributes, tensor_scale)
    except QuarkError:
        return  # of another operator, or with an attribute that the operator does not have and does not look at
    if is_rounded_first or not x.ndim:
        return
    axis = axis % x.ndim if x.ndim > 1 else 0
    expected = quantize_dequantize_blocks(array_kind(x), x, axis, quantizer)
    if not ((result == expected) | (np.isnan(result) & np.isnan(expected))).all():
        raise SystemExit(f"{op_type} {attributes} on shape {x.shape} {x.dtype}: not what numpy has")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--library", type=Path, help="the compiled library to test (default: the installed one)")
    arguments = parser.parse_args()
    if arguments.library is not None:
        native.library_file = lambda: arguments.library
    rng = np.random.default_rng(arguments.seed)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.register_custom_ops_library(str(native.library_file()))
    end = time.monotonic() + arguments.seconds
    arrays = nodes = runs = 0
    while time.monotonic() < end:
        for _ in range(5):
            fuzz_entry(rng)
            arrays += 1
        runs += fuzz_operator(rng, options)
        nodes += 1
    print(f"{native.library_file()}: {arrays} arrays, {nodes} nodes of which {runs} ran, seed {arguments.seed}")


if __name__ == "__main__":
    main()
