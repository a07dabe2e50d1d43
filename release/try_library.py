"""Compare a compiled library with the numpy implementation, bit by bit, also where quark itself cannot be installed.

    python release/try_library.py write FOLDER               needs quark; writes models, inputs and expected outputs
    python release/try_library.py check FOLDER LIBRARY       needs numpy and ONNX Runtime, and Python 3.8 or newer

`check` runs every model in ONNX Runtime with LIBRARY registered. It also works in an emulator (qemu, Wine) with a
Python too old for quark. Exit status 1 if a bit differs. docs/versioning.md says what was tried with it.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import numpy as np

SHAPES = ((7, 70), (2, 33, 5), (1, 130), (4100, 33))
HARD = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1754942e-38, 3.4028235e38, 6e-8, 65504.0, 448.0)


def write(folder: Path) -> None:
    from onnx import TensorProto, helper

    from quark.formats.arrays import array_kind
    from quark.formats.block import BlockQuantizer, quantize_dequantize_blocks
    from quark.formats.catalog import BLOCK_FORMATS
    from quark.ops.onnx_nodes import make_block_node, stored_tensor_scale

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for fmt in BLOCK_FORMATS:
        quantizer = BlockQuantizer(fmt)
        scale = stored_tensor_scale(quantizer)
        for shape in SHAPES:
            x = (random.standard_normal(shape) * 2.0 ** random.integers(-20, 20, shape)).astype(np.float32)
            x.flat[: len(HARD)] = HARD
            for axis in range(len(shape)):
                nodes = [] if scale is None else [helper.make_node("Constant", [], ["scale"], value_float=scale)]
                nodes.append(make_block_node(quantizer, axis, "x", "y", tensor_scale="" if scale is None else "scale"))
                values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
                imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
                graph = helper.make_graph(nodes, "g", values[:1], values[1:])
                model = helper.make_model(graph, opset_imports=imports, ir_version=8)
                y = quantize_dequantize_blocks(array_kind(x), x, axis, quantizer)
                name = f"{fmt.name}-{'x'.join(map(str, shape))}-{axis}"
                (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
                np.savez(folder / f"{name}.npz", x=x, y=y)


def check(folder: Path, library: Path) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(str(library))
    different, values = [], 0
    files = sorted(folder.glob("*.onnx"))
    for file in files:
        arrays = np.load(file.with_suffix(".npz"))
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        y, expected = session.run(None, {"x": arrays["x"]})[0], arrays["y"]
        is_same = (y.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(y) & np.isnan(expected))
        is_same |= (y == 0) & (expected == 0)  # the sign of zero is free
        values += y.size
        if not is_same.all():
            different.append(f"{file.stem}: {np.count_nonzero(~is_same)} of {y.size}")
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
    print(f"{system}, ONNX Runtime {onnxruntime.__version__}: {len(files)} models, {values:,} values, ", end="")
    print("all as in numpy" if files and not different else "\n".join(["different:", *different]))
    sys.exit(not files or bool(different))


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"] and len(sys.argv) == 3:
        write(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["check"] and len(sys.argv) == 4:
        check(Path(sys.argv[2]), Path(sys.argv[3]).resolve())
    else:
        sys.exit(__doc__)
