"""The compiled library, and whether an operator of ours computes what it should: by it, or as portable functions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from quark.report.checks.finding import Finding, Health
from quark.report.checks.loading import explain
from quark.report.checks.requirements import OURS_AGAIN

_SLOWER = "everything works, by portable operators: quantizing is slower, and so are models with block formats"
_COMPILE = (
    "install a C++17 compiler, or take the wheel for this system, then: "
    f"pip install --force-reinstall --no-deps --no-cache-dir {OURS_AGAIN}"
)
_WITHOUT = "QUARK_PURE_PYTHON=1 pip install --force-reinstall --no-deps PATH, with the checkout of quark as PATH"


def native_library() -> Iterator[Finding]:
    """There and loadable; or left out on purpose, which is fine."""
    from quark.formats.native import FILE_NAME, instruction_set, library_file

    path = library_file()
    if path is None:
        detail = f"no native library ({FILE_NAME}): portable operators, slower"
        yield Finding("native library", Health.WARNING, detail, _SLOWER, _COMPILE)
        return
    try:
        instructions = instruction_set()
    except (OSError, AttributeError) as error:  # does not load; or loads, and is not what this version calls
        cause, remedy = explain(error, OURS_AGAIN)
        detail = f"{path} does not load: {cause}"
        consequence = "models with operators of ours cannot be run"
        remedy = f"{remedy}; or do without the library: {_WITHOUT}"
        yield Finding("native library", Health.BROKEN, detail, consequence, remedy)
        return
    if instructions is None:
        detail = f"{path.name} is not used on arrays: QUARK_NO_NATIVE=1 is set"
        yield Finding("native library", Health.INFO, detail, "quantizing arrays is slower", "unset QUARK_NO_NATIVE")
    else:
        forced = os.environ.get("QUARK_INSTRUCTION_SET")
        chosen = f"{instructions}{', as QUARK_INSTRUCTION_SET says' if forced else ''}"
        yield Finding("native library", Health.OK, f"{path.name} loads, for {chosen}")


def custom_operator() -> Iterator[Finding]:
    """One operator of ours in ONNX Runtime, against numpy."""
    import numpy as np
    import onnxruntime

    from quark.formats import quantize_dequantize
    from quark.formats.native import library_file

    library = library_file()
    model = _model_of_one_operator()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if library is None:
        from quark.ops.portable_functions import add_portable_functions

        model = add_portable_functions(model)
    else:
        options.register_custom_ops_library(str(library))
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = np.array([0.1, -0.7, 3.3, 6.1], np.float32)
    (y,) = session.run(None, {"x": x})
    way = "by the library" if library else "as portable functions"
    if np.array_equal(y, quantize_dequantize(x, "mxint8")):
        yield Finding("custom operator", Health.OK, f"MXQuantizeDequantize runs in ONNX Runtime {way} and is exact")
    else:
        detail = f"MXQuantizeDequantize, {way}, gave {y.tolist()} for {x.tolist()}"
        remedy = f"pip install --force-reinstall --no-cache-dir {OURS_AGAIN}; if that changes nothing, report it"
        yield Finding("custom operator", Health.BROKEN, detail, "results of block formats are wrong", remedy)


def _model_of_one_operator() -> Any:
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
    node = helper.make_node("MXQuantizeDequantize", ["x"], ["y"], domain="com.amd.quark", axis=0, rounding_mode=2)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.amd.quark", 1)]
    graph = helper.make_graph([node], "smoke", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)
