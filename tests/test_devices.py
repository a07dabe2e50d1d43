"""Devices: their names, what ONNX Runtime is told, and errors that say why one cannot be used.

Without a GPU the runtime and the driver are imitated; tests marked cuda need both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from quark import devices
from quark.devices import CPU_PROVIDER, CUDA_PROVIDER, Device, Driver, checked_device, device_of
from quark.errors import InvalidValueError, MissingDependencyError, QuarkError
from quark.onnx import QuantizationConfig, get_default_config, quantize
from quark.onnx.session import open_session


def network(size: int = 96) -> Any:
    generator = np.random.default_rng(0)
    constants = [
        numpy_helper.from_array(generator.standard_normal((32, 8, 3, 3)).astype(np.float32) / 8, "w"),
        numpy_helper.from_array(generator.standard_normal((32, 10)).astype(np.float32) / 4, "v"),
    ]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("MatMul", ["f", "v"], ["y"], "product"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 8, size, size])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 10])
    graph = helper.make_graph(nodes, "network", [x], [y], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def samples(count: int = 12, size: int = 96) -> list[dict[str, Any]]:
    generator = np.random.default_rng(1)
    return [{"x": generator.standard_normal((1, 8, size, size)).astype(np.float32)} for _ in range(count)]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A runtime with the CUDA provider, a driver with two GPUs, and what sessions were asked for."""
    asked: list[dict[str, Any]] = []
    actual = onnxruntime.InferenceSession

    class Session:
        def __init__(self, source: Any, options: Any, providers: list[str], provider_options: list[Any]) -> None:
            asked.append(dict(zip(providers, provider_options, strict=True)))
            self._session = actual(source, options, providers=[CPU_PROVIDER])

        def get_providers(self) -> list[str]:
            return list(asked[-1])

        def __getattr__(self, name: str) -> Any:
            return getattr(self._session, name)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA_PROVIDER, CPU_PROVIDER])
    monkeypatch.setattr(devices, "driver", lambda: Driver(("NVIDIA A", "NVIDIA B"), "13.0"))
    return asked


@pytest.mark.parametrize("name", ["cuda:x", "cuda:", "cpu:0", "cuda:-1", "npu", "", "cuda:1234", "cuda:٣"])
def test_other_names_are_errors_that_list_the_kinds(name: str) -> None:
    with pytest.raises(QuarkError, match=r"cpu, cuda, hip, rocm, gpu, cuda:0"):
        Device.parse(name)


@pytest.mark.parametrize(
    ("names", "device"),
    [
        ((), "cpu"),
        (("cpu",), "cpu"),
        (("cuda",), "cuda:0"),
        (("CUDA:1", "cpu"), "cuda:1"),
        ((CPU_PROVIDER,), "cpu"),
        ((CUDA_PROVIDER, CPU_PROVIDER), "cuda:0"),
    ],
)
def test_the_first_name_says_the_device(names: tuple[str, ...], device: str, two_gpus: list[dict[str, Any]]) -> None:
    assert str(device_of(names)) == device


def test_a_provider_that_is_skipped_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU_PROVIDER])
    config = get_default_config("A8W8")
    config.execution_providers = [CUDA_PROVIDER]
    assert quantize(network(), samples(2), config).report.device == "cpu"


def test_the_cuda_provider_gets_its_device_and_computes_in_float32(two_gpus: list[dict[str, Any]]) -> None:
    open_session(network(), providers=("cuda:1",))
    options = two_gpus[-1][CUDA_PROVIDER]
    assert options["device_id"] == "1"
    assert options["use_tf32"] == "0"
    assert options["cudnn_conv_algo_search"] == "HEURISTIC"
    assert list(two_gpus[-1]) == [CUDA_PROVIDER, CPU_PROVIDER]


def test_a_gpu_that_is_not_there_is_an_error(two_gpus: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidValueError, match=r"'cuda:2'.*only cuda:0 \(NVIDIA A\), cuda:1 \(NVIDIA B\)"):
        open_session(network(), providers=("cuda:2",))
    assert not two_gpus


def test_a_runtime_without_the_provider_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU_PROVIDER])
    with pytest.raises(MissingDependencyError, match="pip install onnxruntime-gpu"):
        checked_device("cuda:0")
    with pytest.raises(MissingDependencyError, match="onnxruntime-migraphx"):
        checked_device("hip:0")


@pytest.mark.parametrize("trouble", ["there is no NVIDIA driver", "the NVIDIA driver finds no GPU"])
def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA_PROVIDER, CPU_PROVIDER])
    monkeypatch.setattr(devices, "driver", lambda: Driver(trouble=trouble))
    with pytest.raises(InvalidValueError, match=f"'cuda:0': {trouble}"):
        quantize(network(), samples(2), QuantizationConfig(extra_options={"InferDevice": "cuda:0"}))


def test_falling_back_in_silence_is_an_error(two_gpus: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime.InferenceSession, "get_providers", lambda self: [CPU_PROVIDER])
    with pytest.raises(InvalidValueError, match="'cuda:0': ONNX Runtime cannot load its CUDAExecutionProvider: "):
        open_session(network(), providers=("cuda:0",))
    # a provider by its own name may be missing, as ONNX Runtime's users know it
    assert open_session(network(), providers=(CUDA_PROVIDER,)).get_providers() == [CPU_PROVIDER]


def test_everything_that_measures_runs_on_the_device(two_gpus: list[dict[str, Any]]) -> None:
    config = get_default_config("XINT8")
    config.extra_options["InferDevice"] = "cuda:1"
    model = quantize(network(), samples(), config)
    assert model.report.device == "cuda:1"
    assert '"device": "cuda:1"' in model.report.to_json()
    on_gpu = [gpu for gpu in two_gpus if CUDA_PROVIDER in gpu]
    assert len(on_gpu) >= 3  # calibration, bias correction, the verdict
    assert all(each[CUDA_PROVIDER]["device_id"] == "1" for each in on_gpu)


def test_operators_without_kernels_become_functions(two_gpus: list[dict[str, Any]]) -> None:
    config = get_default_config("MXINT8")
    config.extra_options["PortableFunctions"] = False
    model = quantize(network(), samples(2), config).model
    expected = open_session(model).run(None, samples(1)[0])[0]
    session = open_session(model, providers=("cuda",))  # no library is registered: the runtime would refuse the model
    np.testing.assert_array_equal(session.run(None, samples(1)[0])[0], expected)


def on_both(config: Any) -> tuple[Any, Any]:
    results = []
    for device in ("cpu", "cuda:0"):
        config.extra_options["InferDevice"] = device
        results.append(quantize(network(), samples(), config))
    return results[0], results[1]


@pytest.mark.cuda
def test_float_outputs_agree_with_the_cpu() -> None:
    on_cpu, on_gpu = (open_session(network(), extra_outputs=["c"], providers=(value,)) for value in ("cpu", "cuda:0"))
    for sample in samples(3):
        for one, other in zip(on_cpu.run(None, sample), on_gpu.run(None, sample), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("preset", ["XINT8", "A8W8", "INT8_CNN_DEFAULT", "MXINT8", "BFP16", "A16W8"])
def test_quantizing_on_a_gpu_gives_the_same_network(preset: str) -> None:
    on_cpu, on_gpu = on_both(get_default_config(preset))
    assert on_gpu.report.device == "cuda:0"
    assert on_gpu.report.verdict is on_cpu.report.verdict
    for one, other in zip(on_cpu.report.outputs, on_gpu.report.outputs, strict=True):
        assert abs(one.sqnr_db - other.sqnr_db) < 1.5
    files = [open_session(value.model) for value in (on_cpu, on_gpu)]
    sample = samples(1)[0]
    one, other = (session.run(None, sample)[0] for session in files)
    assert np.square(one - other).sum() < 1e-3 * np.square(one).sum()
