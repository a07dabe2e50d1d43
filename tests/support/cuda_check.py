"""Compare the CUDA kernels with the processor's, bit for bit, and with the speed of a copy.

    python tests/support/cuda_check.py --library libquark_ops.so [--cases cases.npz] [--only NAME] [--output FILE.json]

Needs a GPU, numpy and torch, and nothing of quark's Python but the cases, which `--write-cases FILE.npz` makes where
quark is installed. `--emulated` takes the processor for a device (tests/native/cuda_emulator) and smaller tensors.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

RULES = {"floor": 0, "ceil": 1, "even": 2, "rceil": 3, "mse": 4}
ROUNDINGS = {"half_away": 0, "half_up": 1, "half_even": 2}
POLICIES = {"block_nan": 0, "passthrough": 1}
LENGTHS = [
    *range(1, 36),
    48,
    63,
    64,
    65,
    96,
    100,
    127,
    128,
    129,
    255,
    256,
    500,
    511,
    1000,
    1023,
    2048,
    3001,
    4095,
    4096,
]
LENGTHS += [4097]
BAR = 0.75  # of the speed of a copy


class Parameters(ctypes.Structure):
    """quark::BlockParameters of csrc/formats/block_parameters.h."""

    _fields_ = (
        ("block_size", ctypes.c_int64),
        ("sub_block_size", ctypes.c_int32),
        ("max_shift", ctypes.c_int32),
        ("mantissa_bits", ctypes.c_int32),
        ("min_exponent", ctypes.c_int32),
        ("max_exponent", ctypes.c_int32),
        ("lowest", ctypes.c_float),
        ("highest", ctypes.c_float),
        ("flush_subnormals", ctypes.c_int32),
        ("carry", ctypes.c_int32),
        ("round_to_bfloat16", ctypes.c_int32),
        ("scale_rule", ctypes.c_int32),
        ("rounding", ctypes.c_int32),
        ("nonfinite", ctypes.c_int32),
        ("scale_mantissa_bits", ctypes.c_int32),
        ("scale_min_exponent", ctypes.c_int32),
        ("scale_highest", ctypes.c_float),
        ("tensor_scale", ctypes.c_float),
    )

    def changed(self, **fields: float) -> Parameters:
        copy = Parameters.from_buffer_copy(self)
        for name, value in fields.items():
            setattr(copy, name, value)
        return copy


class LinearTensors(ctypes.Structure):
    """quark::gpu::LinearTensors of csrc/cuda/launch.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero_point", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("storage", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("count", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("inner", ctypes.c_int64),
    )


class Device:
    """Memory that kernels work on: torch's on a GPU."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self.name = torch.cuda.get_device_name()

    def upload(self, values: Array, offset: int = 0) -> Any:
        """The values at `offset` bytes from an aligned address."""
        data = self.torch.empty(values.nbytes + offset + 16, dtype=self.torch.uint8, device="cuda")
        data[offset : offset + values.nbytes] = self.torch.from_numpy(values.reshape(-1).view(np.uint8).copy()).cuda()
        return data

    def empty(self, size: int, offset: int = 0) -> Any:
        return self.torch.full((size + offset + 16,), 0x5A, dtype=self.torch.uint8, device="cuda")

    def address(self, data: Any, offset: int = 0) -> int:
        return data.data_ptr() + offset

    def download(self, data: Any, size: int, offset: int = 0) -> Array:
        whole = data.cpu().numpy()
        assert (whole[:offset] == 0x5A).all(), "written before the output"
        assert (whole[offset + size :] == 0x5A).all(), "written behind the output"
        return whole[offset : offset + size]

    def stream(self) -> int:
        return int(self.torch.cuda.current_stream().cuda_stream)


class Processor(Device):
    """The processor in the place of a GPU."""

    def __init__(self) -> None:
        self.name = "emulated"

    def upload(self, values: Array, offset: int = 0) -> Any:
        data = self.empty(values.nbytes, offset)
        start = self.address(data) - data.ctypes.data
        data[start + offset : start + offset + values.nbytes] = values.reshape(-1).view(np.uint8)
        return data

    def empty(self, size: int, offset: int = 0) -> Any:
        return np.full(size + offset + 32, 0x5A, np.uint8)

    def address(self, data: Any, offset: int = 0) -> int:
        return (data.ctypes.data + 15) // 16 * 16 + offset

    def download(self, data: Any, size: int, offset: int = 0) -> Array:
        start = self.address(data, offset) - data.ctypes.data
        assert (data[:start] == 0x5A).all(), "written before the output"
        assert (data[start + size :] == 0x5A).all(), "written behind the output"
        return data[start : start + size]

    def stream(self) -> int:
        return 0


class Check:
    """Both implementations of one library."""

    def __init__(self, path: Path, device: Device, threads: int) -> None:
        self.library = ctypes.CDLL(str(path.resolve()))
        self.device = device
        self.threads = threads
        self.values = 0
        size, address = ctypes.c_int64, ctypes.c_void_p
        shape = (address, address, ctypes.c_int32, size, size, size, ctypes.POINTER(Parameters))
        self.library.quark_quantize_dequantize.argtypes = [*shape, ctypes.c_int32]
        self.library.quark_cuda_quantize_dequantize.argtypes = [*shape, address]
        self.library.quark_cuda_linear.argtypes = [ctypes.POINTER(LinearTensors), ctypes.c_int32, address]
        self.library.quark_cuda_message.restype = ctypes.c_char_p
        self.library.quark_cuda_problem.restype = ctypes.c_char_p

    def on_cpu(self, x: Array, shape: tuple[int, int, int], parameters: Parameters) -> Array:
        out = np.empty_like(x)
        storage = int(x.dtype == np.float16)
        status = self.library.quark_quantize_dequantize(
            x.ctypes.data, out.ctypes.data, storage, *shape, ctypes.byref(parameters), self.threads
        )
        assert status == 0, status
        return out

    def on_device(self, x: Array, shape: tuple[int, int, int], parameters: Parameters, offset: int = 0) -> Array:
        """`offset` elements from an aligned address."""
        bytes_off = offset * x.itemsize
        source, target = self.device.upload(x, bytes_off), self.device.empty(x.nbytes, bytes_off)
        status = self.library.quark_cuda_quantize_dequantize(
            *(self.device.address(source, bytes_off), self.device.address(target, bytes_off)),
            *(int(x.dtype == np.float16), *shape, ctypes.byref(parameters), self.device.stream()),
        )
        assert status == 0, (status, self.library.quark_cuda_message())
        return self.device.download(target, x.nbytes, bytes_off).view(x.dtype)

    def compare(
        self, what: str, x: Array, shape: tuple[int, int, int], parameters: Parameters, offset: int = 0
    ) -> None:
        """Fails if one bit differs; only the bits of a float16 NaN that is passed through are free."""
        x = np.ascontiguousarray(x).reshape(-1)
        expected, actual = self.on_cpu(x, shape, parameters), self.on_device(x, shape, parameters, offset)
        bits = f"u{x.itemsize}"
        is_wrong = expected.view(bits) != actual.view(bits)
        if x.dtype == np.float16 and parameters.nonfinite == POLICIES["passthrough"]:
            is_wrong &= ~(np.isnan(expected) & np.isnan(actual))
        self.values += x.size
        if is_wrong.any():
            at = int(np.flatnonzero(is_wrong)[0])
            values = {name: getattr(parameters, name) for name, *_ in Parameters._fields_}
            raise AssertionError(
                f"{what}: {is_wrong.sum()} of {x.size} values differ, the first at {at}: {x[at]!r} gave {actual[at]!r} "
                f"({actual.view(bits)[at]:x}), not {expected[at]!r} ({expected.view(bits)[at]:x}); shape {shape}, "
                f"offset {offset}, {values}"
            )

    # ---- what is compared ----
    def golden(self, cases: dict[str, Any]) -> None:
        for key in sorted(cases):
            if not key.startswith("golden__"):
                continue
            _, quantizer, case, axis = key.split("__")
            x = cases[f"in__{case}"]
            parameters = Parameters.from_buffer_copy(cases[key].tobytes())
            at = int(axis)
            shape = x.shape or (1,)
            outer, inner = int(np.prod(shape[:at])), int(np.prod(shape[at + 1 :]))
            self.compare(f"golden {quantizer} {case}", x, (outer, shape[at], inner), parameters)

    def random_bits(self, name: str, parameters: Parameters, count: int) -> None:
        """Every rounding mode, scale rule and policy, both types, both layouts."""
        rng = np.random.default_rng(len(name))
        for rule, rounding, policy in itertools.product(rules_of(parameters), ROUNDINGS, POLICIES):
            if parameters.carry and rule != "floor":
                continue
            options = {"scale_rule": RULES[rule], "rounding": ROUNDINGS[rounding], "nonfinite": POLICIES[policy]}
            for dtype, layout in itertools.product((np.float32, np.float16), ("rows", "columns")):
                x = hard_numbers(rng, count, dtype)
                shape = (count // 2048, 2048, 1) if layout == "rows" else (count // 2048 // 16, 32 * 16, 4 * 16)
                used = int(np.prod(shape))
                self.compare(f"{name} {options} {layout}", x[:used], shape, parameters.changed(**options))

    def lengths(self, name: str, parameters: Parameters, sample: int) -> None:
        """Axes of any length, aligned or not, with and without neighbours that share no block."""
        rng = np.random.default_rng(7 * len(name))
        for i, length in enumerate(LENGTHS):
            if i % sample:
                continue
            for dtype, (outer, inner), offset in itertools.product(
                (np.float32, np.float16), ((1, 1), (3, 1), (4, 1), (2, 5), (1, 49), (3, 64)), (0, 1, 4)
            ):
                x = hard_numbers(rng, outer * length * inner, dtype)
                self.compare(f"{name} length {length}", x, (outer, length, inner), parameters, offset)

    def blocks(self, name: str, parameters: Parameters) -> None:
        """Block sizes and sub-blocks beyond the usual ones, and rounding to bfloat16 before."""
        rng = np.random.default_rng(3)
        for size, rule in itertools.product(
            (1, 2, 3, 4, 5, 8, 16, 24, 32, 33, 64, 128, 256, 512, 1000), ("floor", "mse")
        ):
            if parameters.carry and rule != "floor":
                continue
            variants: list[dict[str, float]] = [{}]
            if parameters.sub_block_size:
                variants = [{"sub_block_size": sub} for sub in (1, 2, 3, 4, 16) if size % sub == 0]
            if parameters.scale_highest == 0:
                variants += [
                    {**variant, "round_to_bfloat16": 1} for variant in variants if parameters.max_exponent == 0
                ]
            for variant, dtype, shape in itertools.product(
                variants, (np.float32, np.float16), ((4, 1024, 1), (3, 100, 1), (2, 70, 13))
            ):
                changed = parameters.changed(block_size=min(size, shape[1]), scale_rule=RULES[rule], **variant)
                self.compare(f"{name} block {size}", hard_numbers(rng, int(np.prod(shape)), dtype), shape, changed)

    def tensor_scales(self, name: str, parameters: Parameters) -> None:
        rng = np.random.default_rng(4)
        for scale in (-1.0, 0.0, 1e-40, 2.0**-20, 0.37, 1.0, 1e30):
            changed = parameters.changed(tensor_scale=scale)
            for shape in ((5, 320, 1), (2, 64, 33), (1, 70000, 1)):
                for dtype in (np.float32, np.float16):
                    x = rng.standard_normal(int(np.prod(shape))).astype(dtype)
                    self.compare(f"{name} tensor scale {scale}", x, shape, changed)
                    self.compare(f"{name} tensor scale {scale}", hard_numbers(rng, x.size, dtype), shape, changed)
                    self.compare(f"{name} tensor scale {scale}", np.zeros_like(x), shape, changed)

    def linear(self, count: int) -> None:
        """The affine operators, against their definition in numpy."""
        rng = np.random.default_rng(5)
        kinds = ["i1", "u1", "i2", "u2", "i4", "u4", "f2", "bf"]
        for (index, kind), dtype, per_channel, offset in itertools.product(
            enumerate(kinds), (np.float32, np.float16), (False, True), (0, 1)
        ):
            inner, channels = (7, 24) if per_channel else (count, 1)
            size = count // (inner * channels) * inner * channels
            x = hard_numbers(rng, size, dtype)
            half = size // 2  # numbers of usual size too
            x[:half] = (rng.standard_normal(half) * 300).astype(dtype)
            scale = (2.0 ** rng.uniform(-6, 6, channels)).astype(dtype)
            code = "u2" if kind == "bf" else kind
            if kind in ("f2", "bf"):
                zero = np.round(rng.standard_normal(channels)).astype(np.float16).view("u2")
                zero = zero if kind == "f2" else (np.round(rng.standard_normal(channels)).astype("f4").view("u4") >> 16)
                zero = np.ascontiguousarray(zero.astype("u2"))
            else:
                limits = np.iinfo(code)
                zero = rng.integers(limits.min // 2, limits.max // 2, channels).astype(code)
            of = np.arange(size) // inner % channels
            expected = quantized(x, scale[of], zero[of], kind)
            codes = self.run_linear(x, scale, zero, index, (size, channels, inner), np.dtype(code), True, offset)
            self.compare_linear(f"quantize {kind} {dtype.__name__}", expected, codes, kind in ("f2", "bf"), kind)
            random = rng.integers(0, 256, size * np.dtype(code).itemsize).astype(np.uint8).view(code)
            expected = dequantized(random, scale[of], zero[of], kind)
            values = self.run_linear(
                random, scale, zero, index, (size, channels, inner), np.dtype(dtype), False, offset
            )
            self.compare_linear(f"dequantize {kind} {dtype.__name__}", expected, values, True, "f4")

    def run_linear(
        self,
        x: Array,
        scale: Array,
        zero: Array,
        kind: int,
        sizes: tuple[int, int, int],
        out: Any,
        quantizes: bool,
        off: int,
    ) -> Array:
        from_off, to_off = off * x.itemsize, off * out.itemsize
        held = [self.device.upload(x, from_off), self.device.upload(scale), self.device.upload(zero)]
        target = self.device.empty(x.size * out.itemsize, to_off)
        addresses = [self.device.address(data, at) for data, at in zip(held, (from_off, 0, 0), strict=True)]
        tensors = LinearTensors(
            *(*addresses, self.device.address(target, to_off), int(scale.dtype == np.float16), kind, *sizes)
        )
        status = self.library.quark_cuda_linear(ctypes.byref(tensors), int(quantizes), self.device.stream())
        assert status == 0, (status, self.library.quark_cuda_message())
        return self.device.download(target, x.size * out.itemsize, to_off).view(out)

    def compare_linear(self, what: str, expected: Array, actual: Array, is_float: bool, kind: str) -> None:
        is_wrong = expected.view(f"u{expected.itemsize}") != actual.view(f"u{expected.itemsize}")
        if is_float:  # NaN is NaN
            wide = [
                from_bfloat16(v) if kind == "bf" else v.view("f2") if kind == "f2" else v for v in (expected, actual)
            ]
            is_wrong &= ~(np.isnan(wide[0]) & np.isnan(wide[1]))
        self.values += expected.size
        if is_wrong.any():
            at = int(np.flatnonzero(is_wrong)[0])
            raise AssertionError(f"{what}: {is_wrong.sum()} differ, at {at} {actual[at]!r} instead of {expected[at]!r}")

    def contexts(self, parameters: Parameters) -> None:
        """Threads that work on two devices in turns; each device gets each kernel once. Emulated only."""
        driver = ctypes.CDLL("libcuda.so.1")
        before = driver.emulator_loaded()
        x = hard_numbers(np.random.default_rng(6), 4096, np.float32)
        changed = parameters.changed(rounding=ROUNDINGS["half_up"], nonfinite=POLICIES["passthrough"])

        def work(thread: int) -> None:
            for turn in range(20):
                driver.emulator_use_context(1000 + (thread + turn) % 2)
                self.compare("contexts", x, (2, 2048, 1) if turn % 4 < 2 else (2, 64, 32), changed)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        loaded = driver.emulator_loaded() - before
        assert loaded == 4, f"two kernels on two devices were loaded {loaded} times"

    # ---- speed ----
    def speed(self, name: str, parameters: Parameters) -> Iterator[dict[str, Any]]:
        """How the operator compares with a copy of the same tensor, in turns."""
        torch = self.device.torch
        layouts = {"4096x4096 last axis": (4096, 4096, 1), "32x256x56x56 axis 1": (32, 256, 56 * 56)}
        for (layout, shape), dtype in itertools.product(layouts.items(), ("float32", "float16")):
            sets = 3  # of tensors, taken in turns, so that no input is in the cache
            inputs = [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for _ in range(sets)]
            outputs = [torch.empty_like(inputs[0]) for _ in range(sets)]
            stream = self.device.stream()

            def operator(
                i: int,
                inputs: Any = inputs,
                outputs: Any = outputs,
                shape: Any = shape,
                dtype: str = dtype,
                stream: int = stream,
            ) -> None:
                self.library.quark_cuda_quantize_dequantize(
                    *(inputs[i % 3].data_ptr(), outputs[i % 3].data_ptr(), int(dtype == "float16"), *shape),
                    *(ctypes.byref(parameters), stream),
                )

            def copy(i: int, inputs: Any = inputs, outputs: Any = outputs) -> None:
                outputs[i % 3].copy_(inputs[i % 3])

            begin = time.perf_counter()
            operator(0)
            torch.cuda.synchronize()
            first = time.perf_counter() - begin
            best = {"operator": 1e9, "copy": 1e9}
            for _ in range(5):
                for what, run in (("copy", copy), ("operator", operator)):
                    best[what] = min(best[what], milliseconds(torch, run, 12))
            share = best["copy"] / best["operator"]
            yield {
                "format": name,
                "layout": layout,
                "dtype": dtype,
                "copy_ms": best["copy"],
                "operator_ms": best["operator"],
                "share_of_copy": share,
                "reaches_bar": share >= BAR,
                "first_call_ms": first * 1e3,
            }


def milliseconds(torch: Any, run: Any, repeats: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run(0)
    begin.record()
    for i in range(repeats):
        run(i)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def rules_of(parameters: Parameters) -> list[str]:
    return ["floor", "mse"] if parameters.scale_highest > 0 else list(RULES)


def hard_numbers(rng: np.random.Generator, count: int, dtype: Any) -> Array:
    """Random bits; numbers of similar size; few bits of mantissa, for ties; and subnormal numbers."""
    bits = rng.integers(0, 2 ** (8 * np.dtype(dtype).itemsize), count, dtype=np.uint64)
    mantissa, exponents = (23, 0xFF) if dtype == np.float32 else (10, 0x1F)
    quarter = np.arange(count) * 4 // max(1, count)
    middle = exponents // 2
    span = 12 if dtype == np.float32 else 4
    near = (bits & ~np.uint64(exponents << mantissa)) | (
        (rng.integers(middle - span, middle + span, count).astype(np.uint64)) << np.uint64(mantissa)
    )
    few = near & ~np.uint64((1 << (mantissa - rng.integers(1, 7))) - 1)
    small = bits & ~np.uint64((exponents & ~1) << mantissa)
    chosen = np.select([quarter == 0, quarter == 1, quarter == 2], [bits, near, few], small)
    return chosen.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)


def from_bfloat16(bits: Array) -> Array:
    return (bits.astype("u4") << 16).view("f4")


def quantized(x: Array, scale: Array, zero: Array, kind: str) -> Array:
    with np.errstate(all="ignore"):
        quotient = x.astype("f4") / scale.astype("f4")
        if kind in ("f2", "bf"):
            shifted = quotient + (zero.view("f2").astype("f4") if kind == "f2" else from_bfloat16(zero))
            highest = np.float32(65504) if kind == "f2" else from_bfloat16(np.array([0x7F7F], "u2"))[0]
            shifted = np.where(np.isfinite(shifted), np.clip(shifted, -highest, highest), shifted)
            if kind == "f2":
                return shifted.astype("f2").view("u2")
            bits = np.ascontiguousarray(shifted, "f4").view("u4")
            rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
            return np.where(np.isnan(shifted), (bits | 0x400000) >> 16, rounded).astype("u2")
        whole = np.where(np.isnan(quotient), 0, np.rint(quotient)).astype("f8") + zero.astype("f8")
        limits = np.iinfo(kind)
        return np.clip(whole, limits.min, limits.max).astype(kind)


def dequantized(codes: Array, scale: Array, zero: Array, kind: str) -> Array:
    with np.errstate(all="ignore"):
        if kind == "f2":
            value = (codes.view("f2").astype("f4") - zero.view("f2").astype("f4")) * scale.astype("f4")
        elif kind == "bf":
            value = (from_bfloat16(codes) - from_bfloat16(zero)) * scale.astype("f4")
        else:
            value = (codes.astype("i8") - zero.astype("i8")).astype("f4") * scale.astype("f4")
        if scale.dtype == np.float16:  # saturates
            value = np.where(np.isfinite(value), np.clip(value, -65504, 65504), value)
        return value.astype(scale.dtype)


def write_cases(path: Path) -> None:
    """Golden inputs, and the parameters of every quantizer and format; here quark is needed."""
    import golden

    from quark.formats.block import BlockQuantizer
    from quark.formats.catalog import BLOCK_FORMATS
    from quark.formats.native import _parameters
    from quark.formats.spec import BlockFormat

    def stored(quantizer: BlockQuantizer, length: int) -> Array:
        return np.frombuffer(bytes(_parameters(quantizer, length)), np.uint8)

    arrays = {key: value for key, value in golden.load().items() if key.startswith("in__")}
    for name in golden.quantizer_names():
        for case in golden.cases(name):
            axis = case.axis % max(1, case.x.ndim)
            length = max(1, (case.x.shape or (1,))[axis])
            arrays[f"golden__{name}__{case.name}__{axis}"] = stored(golden.quantizer(name), length)
    formats: dict[str, BlockFormat] = {str(fmt): fmt for fmt in BLOCK_FORMATS}
    for name, fmt in formats.items():
        arrays[f"format__{name}"] = stored(BlockQuantizer(fmt), 1 << 20)
    np.savez_compressed(path, **arrays)


def compare_all(check: Check, cases: dict[str, Any], formats: dict[str, Parameters], options: Any) -> dict[str, Any]:
    """What was compared, with the number of values and 'equal' or what was wrong."""
    parts, count, sample = options.parts, options.count, options.sample
    tasks: list[tuple[str, Any, tuple[Any, ...]]] = []
    if "golden" in parts:
        tasks.append(("golden", check.golden, (cases,)))
    for name, parameters in formats.items():
        if "random" in parts:
            tasks.append((f"random {name}", check.random_bits, (name, parameters, count)))
        if "lengths" in parts:
            tasks.append((f"lengths {name}", check.lengths, (name, parameters, sample)))
        if "blocks" in parts:
            tasks.append((f"blocks {name}", check.blocks, (name, parameters)))
        if "blocks" in parts and parameters.scale_highest > 0:
            tasks.append((f"tensor scales {name}", check.tensor_scales, (name, parameters)))
    if "linear" in parts:
        tasks.append(("linear", check.linear, (count,)))
    if "contexts" in parts:
        tasks.append(("contexts", check.contexts, (next(iter(formats.values())),)))
    outcomes: dict[str, Any] = {}
    for what, run, values in tasks:
        before, begin, outcome = check.values, time.perf_counter(), "equal"
        try:
            run(*values)
        except AssertionError as error:
            outcome = f"FAILED: {error}"
        outcomes[what] = {"values": check.values - before, "outcome": outcome}
        print(f"{what}: {check.values - before} values, {time.perf_counter() - begin:.1f} s: {outcome}", flush=True)
    return outcomes


def speed_variants(name: str, parameters: Parameters) -> dict[str, Parameters]:
    """The options of a format that cost differently, by what to call them."""
    half_even = parameters.changed(rounding=ROUNDINGS["half_even"])
    if parameters.scale_highest > 0:
        given = half_even.changed(tensor_scale=0.001)
        variants = {f"{name} given tensor scale": given, f"{name} tensor scale found": half_even}
        return {**variants, f"{name} mse": given.changed(scale_rule=RULES["mse"])}
    variants = {name: parameters.changed(rounding=ROUNDINGS["half_away"]), f"{name} half_even": half_even}
    if name == "mxfp4_e2m1":
        variants[f"{name} mse"] = half_even.changed(scale_rule=RULES["mse"])
    return variants


def measure_all(check: Check, formats: dict[str, Parameters]) -> list[dict[str, Any]]:
    rows = []
    for name, parameters in formats.items():
        for variant, changed in speed_variants(name, parameters).items():
            for row in check.speed(variant, changed):
                rows.append(row)
                print(
                    f"{variant:34} {row['layout']:20} {row['dtype']}: {row['operator_ms']:.4f} ms, copy "
                    f"{row['copy_ms']:.4f}, {100 * row['share_of_copy']:.0f} % of a copy, first call "
                    f"{row['first_call_ms']:.0f} ms{'' if row['reaches_bar'] else '  BELOW'}",
                    flush=True,
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path)
    parser.add_argument("--cases", type=Path, default=Path("cases.npz"))
    parser.add_argument("--write-cases", type=Path, metavar="FILE")
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--parts", nargs="+", default=["golden", "random", "lengths", "blocks", "linear", "speed"])
    parser.add_argument("--formats", nargs="+", help="all by default")
    parser.add_argument("--count", type=int, default=1 << 17, help="random values for each set of options")
    parser.add_argument("--sample", type=int, default=1, help="take every Nth axis length")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.write_cases:
        return write_cases(arguments.write_cases)
    device = Processor() if arguments.emulated else Device()
    check = Check(arguments.library, device, arguments.threads)
    print("device:", device.name, "problem:", repr(check.library.quark_cuda_problem().decode()))
    with np.load(arguments.cases) as file:
        cases = dict(file)
    stored = {key.split("__")[1]: value for key, value in cases.items() if key.startswith("format__")}
    formats = {
        name: Parameters.from_buffer_copy(value.tobytes())
        for name, value in stored.items()
        if not arguments.formats or name in arguments.formats
    }
    results: dict[str, Any] = {"device": device.name, "exact": compare_all(check, cases, formats, arguments)}
    if "speed" in arguments.parts and not arguments.emulated:
        results["speed"] = measure_all(check, formats)
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1))
    failures = sum(row["outcome"] != "equal" for row in results["exact"].values())
    print("values compared:", check.values, "failures:", failures)
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
