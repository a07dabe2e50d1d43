"""Operators compared with memcpy: GB/s (bytes read and written), and relative to a copy of the same tensor.

    python -m bench.ops [--formats NAME ...] [--quick]

Columns: the native operator inside ONNX Runtime with one and two threads, the array implementations without native
code, and the portable function on stock ONNX Runtime. A share is relative to a copy with as many threads. Each figure
is the best of several alternating turns in the same run; the spread is in the JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from bench.record import Record, add_record_arguments, say
from bench.timing import Timing, take_turns
from quark.formats.arrays import array_kind
from quark.formats.block import BlockQuantizer, quantize_dequantize_blocks
from quark.formats.catalog import BLOCK_FORMATS, get_format
from quark.formats.spec import BlockFormat
from quark.ops.library import get_library_path
from quark.ops.onnx_nodes import make_block_node
from quark.ops.portable_functions import add_portable_functions


@dataclass(frozen=True)
class Case:
    """A tensor and the axis that its blocks run along."""

    shape: tuple[int, ...]
    axis: int

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} axis {self.axis}"


MATRIX = 4096
IMAGE = Case((1, 256, 56, 56), 1)
CASES = (Case((MATRIX, MATRIX), 1), Case((MATRIX, MATRIX), 0), IMAGE)
HEADER = ["format", "tensor", "copy GB/s", "native, 1 thread", "native, 2 threads", "numpy", "torch", "portable"]


@dataclass(frozen=True)
class Figure:
    """One measured cell of the table."""

    format: str
    case: str
    what: str
    threads: int
    gigabytes_per_second: float
    share_of_copy: float
    seconds: Timing
    copy_seconds: Timing


class Copy:
    """A copy of x by some threads: the reference."""

    def __init__(self, x: np.ndarray[Any, Any], threads: int) -> None:
        self.target = np.empty_like(x)
        self.parts = [
            (target, source)
            for target, source in zip(
                np.array_split(self.target.reshape(-1), threads), np.array_split(x.reshape(-1), threads), strict=True
            )
        ]
        self.pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __call__(self) -> None:
        if self.pool is None:
            np.copyto(*self.parts[0])
        else:
            list(self.pool.map(lambda part: np.copyto(*part), self.parts))


def operator_model(quantizer: BlockQuantizer, case: Case, opset: int = 17) -> onnx.ModelProto:
    """A model of the one operator."""
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, case.shape) for name in ("x", "y")]
    graph = helper.make_graph([make_block_node(quantizer, case.axis, "x", "y")], "bench", value[:1], value[1:])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.amd.quark", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def session_run(model: onnx.ModelProto, x: np.ndarray[Any, Any], threads: int, native: bool) -> Callable[[], object]:
    """A run of the model with input and output bound in place, so that nothing but the model is timed."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    if native:
        options.register_custom_ops_library(get_library_path())
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    # memory of ONNX Runtime's own, as between the nodes of a larger model
    source, target = (onnxruntime.OrtValue.ortvalue_from_shape_and_type(x.shape, x.dtype, "cpu") for _ in range(2))
    source.update_inplace(x)
    binding.bind_ortvalue_input("x", source)
    binding.bind_ortvalue_output("y", target)
    return lambda: session.run_with_iobinding(binding)


def candidates(quantizer: BlockQuantizer, case: Case, x: np.ndarray[Any, Any], threads: int) -> dict[str, Any]:
    """What is measured with that many threads."""
    model = operator_model(quantizer, case)
    runs = {"native": session_run(model, x, threads, native=True)}
    if threads == 1:
        runs["numpy"] = lambda: quantize_dequantize_blocks(array_kind(x), x, case.axis, quantizer)
        if case == IMAGE:
            runs["portable"] = session_run(add_portable_functions(model), x, threads, native=False)
    return runs


def torch_candidate(quantizer: BlockQuantizer, case: Case, x: np.ndarray[Any, Any]) -> Callable[[], object] | None:
    """torch eager with its own number of threads, where torch is installed."""
    try:
        import torch
    except ImportError:
        return None
    tensor = torch.from_numpy(x)
    return lambda: quantize_dequantize_blocks(array_kind(tensor), tensor, case.axis, quantizer)


def measure(fmt: BlockFormat, case: Case, turns: int) -> Iterator[Figure]:
    """All figures of a format on one tensor."""
    x = np.random.default_rng(0).standard_normal(case.shape, dtype=np.float32)
    quantizer = BlockQuantizer(fmt, nonfinite=fmt.default_nonfinite)
    for threads in (1, 2):
        runs = candidates(quantizer, case, x, threads)
        slow = {name: runs.pop(name) for name in ("numpy", "portable") if name in runs}
        timings = take_turns({"copy": Copy(x, threads), **runs}, turns * threads)
        for name, run in slow.items():
            timings[name] = take_turns({name: run}, 2, 0.0)[name]
        if threads == 1 and (torch_run := torch_candidate(quantizer, case, x)) is not None:
            timings["torch"] = take_turns({"torch": torch_run}, 2, 0.0)["torch"]
        copy = timings.pop("copy")
        for name, timing in timings.items():
            rate = 2 * x.nbytes / timing.best / 1e9
            yield Figure(str(fmt), str(case), name, threads, rate, copy.best / timing.best, timing, copy)


def row(figures: list[Figure]) -> list[str]:
    """The cells of one format and tensor."""
    found = {(figure.what, figure.threads): figure for figure in figures}
    one, two = (found.get(("native", threads)) for threads in (1, 2))
    copy = f"{one.gigabytes_per_second / one.share_of_copy:.1f}" if one else ""
    native = [f"{value.gigabytes_per_second:.1f} ({value.share_of_copy:.0%})" if value else "" for value in (one, two)]
    numpy, torch, portable = (found.get((name, 1)) for name in ("numpy", "torch", "portable"))
    plain = [f"{value.gigabytes_per_second:.2f}" if value else "" for value in (numpy, torch)]
    times = f"{portable.seconds.best / one.seconds.best:.0f} x native time" if portable and one else ""
    return [figures[0].format, figures[0].case, copy, *native, *plain, times]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=[str(fmt) for fmt in BLOCK_FORMATS])
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    add_record_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    formats = [get_format(name) for name in arguments.formats]
    for fmt in formats:
        if not isinstance(fmt, BlockFormat):
            raise SystemExit(f"--formats {fmt}: expected a block format")
    turns = 3 if arguments.quick else 9
    record = Record.begin("ops", arguments, HEADER, [f"GB/s, and the share of a copy; best of {turns} turns or more."])
    for fmt in formats:
        for case in CASES:
            say(f"{fmt} {case}")
            figures = list(measure(fmt, case, turns))
            record.add([row(figures)], [asdict(figure) for figure in figures])
    record.finish()


if __name__ == "__main__":
    main()
