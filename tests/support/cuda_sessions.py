"""The operators in ONNX Runtime's CUDA provider: placed there, equal to the CPU's, and what they cost in networks.

    python tests/support/cuda_sessions.py --library libquark_ops.so [--models FOLDER] [--device N] [--output FILE.json]

Needs a GPU, onnxruntime-gpu with CUDA's libraries (torch's will do), numpy and onnx; nothing of quark's Python. Models
are those of FOLDER/*.onnx with one input, images of 224; weights that a file leaves out are filled with random numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

Array = np.ndarray[Any, Any]

DOMAIN = "com.amd.quark"
TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.float16): TensorProto.FLOAT16}
SHAPES = ((4, 64, 7, 7), (2, 96, 5), (3, 128), (2, 3, 33, 32), (1000,))

# Every operator, with the options that lead to other kernels; axes are those of SHAPES' tensors that have them.
BLOCK_NODES: list[tuple[str, dict[str, Any]]] = [
    ("MXQuantizeDequantize", {}),
    ("MXQuantizeDequantize", {"element_dtype": "fp4_e2m1", "rounding_mode": 2}),
    ("MXQuantizeDequantize", {"element_dtype": "fp8_e4m3", "scale_rule": "rceil", "axis": -1}),
    ("MXQuantizeDequantize", {"element_dtype": "fp6_e3m2", "scale_rule": "mse", "nonfinite": "passthrough"}),
    ("BFPQuantizeDequantize", {}),
    ("BFPQuantizeDequantize", {"convert_to_bfloat_before_bfp": 1, "axis": -1, "rounding_mode": 1}),
    ("BFPQuantizeDequantize", {"use_compiler_version_cpu_kernel": 1}),
    ("BFPQuantizeDequantize", {"bfp_method": "to_bfp_prime", "bit_width": 13, "block_size": 16}),
    ("FloatScaleQuantizeDequantize", {}),
    ("FloatScaleQuantizeDequantize", {"axis": -1, "tensor_scale": 0.01}),
    ("FloatScaleQuantizeDequantize", {"scale_rule": "mse", "tensor_scale": 0.003}),
]
CODES = ("INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "FLOAT16", "BFLOAT16")


def open_session(runtime: Any, model: Any, library: Path, device: int | None, profile: str = "") -> Any:
    """`device` None is the CPU. A session that is profiled takes the first convolution algorithm that will do."""
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(str(library.resolve()))
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    providers: list[Any] = ["CPUExecutionProvider"]
    if device is not None:
        search = "HEURISTIC" if profile else "EXHAUSTIVE"
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": str(device), "cudnn_conv_algo_search": search}))
    return runtime.InferenceSession(model.SerializeToString(), options, providers=providers)


def block_model(op_type: str, attributes: dict[str, Any], x: Array) -> Any:
    attributes = dict(attributes)
    scale = attributes.pop("tensor_scale", None)
    inputs = ["x"] if scale is None else ["x", "t"]
    node = helper.make_node(op_type, inputs, ["y"], "node", domain=DOMAIN, **attributes)
    constants = [] if scale is None else [helper.make_tensor("t", TensorProto.FLOAT, [], [scale])]
    return model_of([node], x, TYPES[x.dtype], constants)


def linear_model(code: str, x: Array, channels: int) -> Any:
    """Quantize, dequantize, so that input and output are floats."""
    rng = np.random.default_rng(channels)
    shape = [] if channels == 1 else [channels]
    scales = helper.make_tensor("s", TYPES[x.dtype], shape, (2.0 ** rng.integers(-4, 3, channels)).astype(x.dtype))
    zeros = helper.make_tensor("z", getattr(TensorProto, code), shape, rng.integers(0, 9, channels))
    nodes = [
        helper.make_node("ExtendedQuantizeLinear", ["x", "s", "z"], ["q"], "q", domain=DOMAIN, axis=1),
        helper.make_node("ExtendedDequantizeLinear", ["q", "s", "z"], ["y"], "d", domain=DOMAIN, axis=1),
    ]
    return model_of(nodes, x, TYPES[x.dtype], [scales, zeros])


def model_of(nodes: list[Any], x: Array, dtype: int, constants: list[Any]) -> Any:
    values = [helper.make_tensor_value_info(name, dtype, x.shape) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def hard_input(shape: tuple[int, ...], dtype: Any) -> Array:
    x = (np.random.default_rng(1).standard_normal(shape) * 4).astype(dtype)
    flat = x.reshape(-1)
    flat[5], flat[40], flat[-3] = np.nan, np.inf, 1e-6
    return x


def same(a: Array, b: Array) -> bool:
    """The same bits; NaN is NaN."""
    bits = f"u{a.itemsize}"
    return bool(((a.view(bits) == b.view(bits)) | (np.isnan(a) & np.isnan(b))).all())


def providers_of_nodes(profile: str) -> Counter[str]:
    """How often which operator ran where, such as 'CUDA MXQuantizeDequantize'."""
    events = json.loads(Path(profile).read_text())
    ran: Counter[str] = Counter()
    for event in events:
        arguments = event.get("args", {})
        if event.get("cat") == "Node" and "provider" in arguments and event["name"].endswith("kernel_time"):
            ran[f"{arguments['provider'].removesuffix('ExecutionProvider')} {arguments.get('op_name')}"] += 1
    return ran


def models_of_operators() -> list[tuple[str, Any, Array]]:
    models: list[tuple[str, Any, Array]] = []
    for dtype in (np.float32, np.float16):
        for shape in SHAPES:
            x = hard_input(shape, dtype)
            for op_type, attributes in BLOCK_NODES:
                models.append((f"{op_type} {attributes} {shape} {x.dtype}", block_model(op_type, attributes, x), x))
        x = hard_input((3, 8, 5, 7), dtype)
        models += [
            (f"linear {code} {channels} {x.dtype}", linear_model(code, x, channels), x)
            for code in CODES
            for channels in (1, 8)
        ]
    return models


def differences(runtime: Any, library: Path, device: int, folder: str) -> list[str]:
    """The operators that are not equal to the CPU's, or not on the GPU."""
    found: list[str] = []
    models = models_of_operators()
    for i, (what, model, x) in enumerate(models):
        if i % 20 == 0:
            print(f"operators: {i} of {len(models)} compared, {len(found)} differ", flush=True)
        expected = open_session(runtime, model, library, None).run(None, {"x": x})[0]
        session = open_session(runtime, model, library, device, str(Path(folder, f"operator{i}")))
        actual = session.run(None, {"x": x})[0]
        ran = providers_of_nodes(session.end_profiling())
        if not same(expected, actual):
            found.append(f"{what}: {int((expected != actual).sum())} of {x.size} values differ")
        if not ran or any(not name.startswith("CUDA ") for name in ran if "Memcpy" not in name):
            found.append(f"{what}: ran as {dict(ran)}")
    return found


def filled(model: Any) -> Any:
    """The model with random numbers for weights that it leaves out, of a size that keeps activations in range."""
    rng = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.dims and not tensor.raw_data and not tensor.float_data:
            shape = tuple(tensor.dims)
            fan_in = max(1, int(np.prod(shape[1:])))
            tensor.raw_data = (rng.standard_normal(shape) / np.sqrt(fan_in)).astype(np.float32).tobytes()
    return model


def time_network(runtime: Any, path: Path, library: Path, device: int, batches: tuple[int, ...], folder: str) -> Any:
    """Milliseconds of a run with inputs and outputs on the device, and what ran where."""
    model = filled(onnx.load(path))
    begin = time.perf_counter()
    session = open_session(runtime, model, library, device)
    row: dict[str, Any] = {"session_s": time.perf_counter() - begin}
    name = session.get_inputs()[0].name
    for batch in batches:
        x = np.random.default_rng(0).standard_normal((batch, 3, 224, 224)).astype(np.float32)
        binding = session.io_binding()
        binding.bind_ortvalue_input(name, runtime.OrtValue.ortvalue_from_numpy(x, "cuda", device))
        for output in session.get_outputs():
            binding.bind_output(output.name, "cuda", device)
        begin = time.perf_counter()
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        row[f"first_run_ms_{batch}"] = (time.perf_counter() - begin) * 1e3
        times = []
        for _ in range(40):
            begin = time.perf_counter()
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
            times.append((time.perf_counter() - begin) * 1e3)
        row[f"best_ms_{batch}"], row[f"median_ms_{batch}"] = min(times), float(np.median(times))
    profiled = open_session(runtime, model, library, device, str(Path(folder, path.stem)))
    profiled.run(None, {name: x[:1]})
    row["nodes"] = dict(providers_of_nodes(profiled.end_profiling()))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--models", type=Path, metavar="FOLDER")
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--skip-operators", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    import onnxruntime

    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    results: dict[str, Any] = {"onnxruntime": onnxruntime.__version__, "differences": [], "networks": {}}
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.skip_operators:
            begin = time.perf_counter()
            results["differences"] = differences(onnxruntime, arguments.library, arguments.device, folder)
            count = len(models_of_operators())
            print(
                f"operators: {count} models, {time.perf_counter() - begin:.1f} s, {len(results['differences'])} differ"
            )
            print("\n".join(results["differences"][:20]), flush=True)
        for path in sorted(arguments.models.glob("*.onnx")) if arguments.models else ():
            row = time_network(onnxruntime, path, arguments.library, arguments.device, tuple(arguments.batches), folder)
            results["networks"][path.stem] = row
            print(path.stem, json.dumps(row), flush=True)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1))
    sys.exit(bool(results["differences"]))


if __name__ == "__main__":
    main()
