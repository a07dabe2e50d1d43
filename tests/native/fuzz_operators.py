"""Throw random shapes, parameters, attributes and bits at the compiled library; stop at the first surprise.

    python fuzz_operators.py [--seconds S] [--seed N] [--library FILE]

Shapes and values go through the entry for numpy arrays and are compared with the array implementation; attributes, most
of them wrong, go through ONNX Runtime, which must answer with a result or an error and never with the end of the
process. `make test-sanitized` runs this on a build with AddressSanitizer and UndefinedBehaviorSanitizer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from quark.formats import native
from quark.formats.arrays import array_kind
from quark.formats.block import BlockQuantizer, quantize_dequantize_blocks
from quark.formats.catalog import BLOCK_FORMATS
from quark.formats.spec import BlockFormat, NonFinite, Rounding, ScaleRule, SubBlocks

Array = np.ndarray[Any, Any]
Random = np.random.Generator

EXTENTS = [0, 1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 32, 33, 40, 64, 100]
BLOCKS = [1, 2, 3, 5, 7, 8, 13, 16, 24, 32, 33, 64, 100, 128, 1000, 5000]
NUMBERS = [0, 1, 2, 3, -1, 7, 8, 16, 32, 64, 1000, -(2**63), 2**63 - 1, 2**31, -(2**31), 2**32]
WORDS = ["", "int8", "fp8_e4m3", "fp4_e2m1", "floor", "mse", "to_bfp", "to_bfp_prime", "passthrough", "\x00", "é" * 300]
NAMES = ["axis", "block_size", "rounding_mode", "element_dtype", "scale_rule", "nonfinite", "bfp_method", "bit_width"]
NAMES += ["sub_block_size", "sub_block_shift_bits", "convert_to_bfloat_before_bfp", "use_compiler_version_cpu_kernel"]


def random_quantizer(rng: Random) -> BlockQuantizer:
    fmt: BlockFormat = BLOCK_FORMATS[rng.integers(len(BLOCK_FORMATS))]
    fmt = fmt.with_block_size(int(rng.choice(BLOCKS))) if rng.random() < 0.6 else fmt
    if fmt.sub_blocks is not None and rng.random() < 0.5:
        fmt = replace(fmt, sub_blocks=SubBlocks(int(rng.integers(1, 9)), int(rng.integers(0, 5))))
    rule = ScaleRule.FLOOR if fmt.carry else list(ScaleRule)[rng.integers(5)]
    return BlockQuantizer(fmt, rule, list(Rounding)[rng.integers(3)], list(NonFinite)[rng.integers(2)])


def random_values(rng: Random, shape: tuple[int, ...]) -> Array:
    kind = rng.integers(5)
    if kind == 0:
        x = rng.standard_normal(shape)
    elif kind == 1:
        x = np.asarray(rng.integers(0, 2**32, shape, dtype=np.uint64)).astype(np.uint32).view(np.float32)
    elif kind == 2:
        x = rng.standard_normal(shape) * 2.0 ** rng.integers(-149, 128, shape)
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


def fuzz_entry(rng: Random) -> None:
    """One random array through the compiled code and through numpy."""
    shape = tuple(int(n) for n in rng.choice(EXTENTS, rng.integers(0, 5)))
    if np.prod(shape) > 100_000:
        return
    quantizer, x = random_quantizer(rng), random_values(rng, shape)
    x = between_elements(x) if rng.random() < 0.1 else x
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
    """One node with random attributes on one random tensor; True if it ran. Errors are fine, crashes are not."""
    op_type = str(rng.choice(["MXQuantizeDequantize", "BFPQuantizeDequantize"]))
    shape = tuple(int(n) for n in rng.choice(EXTENTS[:8], rng.integers(0, 4)))
    node = helper.make_node(op_type, ["x"], ["y"], domain="com.amd.quark", **random_attributes(rng))
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("x", "y")]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
    model = helper.make_model(helper.make_graph([node], "g", info[:1], info[1:]), opset_imports=imports, ir_version=8)
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        session.run(None, {"x": np.asarray(rng.standard_normal(shape), np.float32)})
    except Exception as error:  # ONNX Runtime has no common class for its errors
        if op_type not in str(error):
            raise SystemExit(f"an error that does not name the operator: {error}") from error
        return False
    return True


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
