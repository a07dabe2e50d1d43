"""The CUDA kernels of the operator library give the processor's bits: on a GPU, and compiled for the processor."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from cuda_check import Check, Device, Parameters, write_cases
from cuda_sessions import differences

from quark.formats.catalog import BLOCK_FORMATS
from quark.ops.library import get_library_path

SUPPORT = Path(__file__).resolve().parents[1] / "support"
EMULATOR = Path(__file__).resolve().parents[1] / "native" / "cuda_emulator"
HAS_GPU = torch.cuda.is_available()

needs_gpu = [pytest.mark.cuda, pytest.mark.skipif(not HAS_GPU, reason="no CUDA device")]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "cases.npz"
    write_cases(path)
    return path


# ---- without a GPU ----
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="compiled by g++, on Linux")
def test_kernels_on_the_processor(cases: Path, tmp_path: Path) -> None:
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-w", str(EMULATOR / "driver.cc")]
    subprocess.run([*command, "-o", str(tmp_path / "libcuda.so.1"), "-ldl"], check=True)
    result = subprocess.run(
        [
            *(sys.executable, str(SUPPORT / "cuda_check.py"), "--emulated", "--library", get_library_path()),
            *("--cases", str(cases), "--count", "8192", "--sample", "11", "--threads", "1"),
            *("--parts", "contexts", "golden", "random", "lengths", "linear"),
        ],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "device: emulated problem: ''" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("failures: 0")


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_without_a_driver_the_reason_is_told() -> None:
    library = ctypes.CDLL(get_library_path())
    library.quark_cuda_problem.restype = library.quark_cuda_message.restype = ctypes.c_char_p
    problem = library.quark_cuda_problem().decode()
    assert "NVIDIA's driver" in problem or "CUDA could not be started" in problem
    number = np.ones(1, np.float32)
    parameters = Parameters(block_size=1, highest=1.0, lowest=-1.0)
    size = ctypes.c_int64
    library.quark_cuda_quantize_dequantize.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, *[size] * 3]
    library.quark_cuda_quantize_dequantize.argtypes += [ctypes.POINTER(Parameters), ctypes.c_void_p]
    address = number.ctypes.data
    call = library.quark_cuda_quantize_dequantize
    assert call(address, address, 0, 1, 1, 1, ctypes.byref(parameters), None) == 2
    assert problem in library.quark_cuda_message().decode()
    assert call(address, address, 7, 1, 1, 1, ctypes.byref(parameters), None) == 1


# ---- with one ----
@pytest.fixture(scope="module")
def check() -> Check:
    return Check(Path(get_library_path("CUDA")), Device(), threads=4)


@pytest.fixture(scope="module")
def formats(cases: Path) -> dict[str, Parameters]:
    with np.load(cases) as file:
        found = {name: file[name].tobytes() for name in file if name.startswith("format__")}
    return {name.split("__")[1]: Parameters.from_buffer_copy(data) for name, data in found.items()}


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_golden_values(self, check: Check, cases: Path) -> None:
        with np.load(cases) as file:
            check.golden(dict(file))

    @pytest.mark.parametrize("name", [str(fmt) for fmt in BLOCK_FORMATS])
    def test_random_bits_and_axes_of_any_length(self, check: Check, formats: dict[str, Parameters], name: str) -> None:
        check.random_bits(name, formats[name], 1 << 17)
        check.lengths(name, formats[name], sample=3)
        check.blocks(name, formats[name])
        if formats[name].scale_highest > 0:
            check.tensor_scales(name, formats[name])

    def test_affine_operators(self, check: Check) -> None:
        check.linear(1 << 20)

    @pytest.mark.skipif(
        "CUDAExecutionProvider" not in onnxruntime.get_available_providers(), reason="this ONNX Runtime has no CUDA"
    )
    @pytest.mark.parametrize("device", range(torch.cuda.device_count()))
    def test_operators_in_the_cuda_provider(self, device: int, tmp_path: Path) -> None:
        assert differences(onnxruntime, Path(get_library_path("CUDA")), device, str(tmp_path)) == []
