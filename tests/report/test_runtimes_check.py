"""ONNX Runtime and torch: several, none, too old, half uninstalled, without a driver."""

import importlib.util
import sys
import types
from typing import Any

import pytest
from distributions import install, set_version

from quark.report.installation import Health, onnxruntime, torch


def fake_runtime(monkeypatch, version="1.30.0", providers=("CPUExecutionProvider",)):
    module: Any = types.ModuleType("onnxruntime")
    module.__spec__ = importlib.util.spec_from_loader("onnxruntime", None)
    if version is not None:
        module.__version__ = version
        module.InferenceSession = object
        module.get_available_providers = lambda: list(providers)
    monkeypatch.setitem(sys.modules, "onnxruntime", module)


def test_two_distributions_overwrite_each_other(monkeypatch):
    install(monkeypatch, "onnxruntime_gpu")
    first, second = onnxruntime()
    assert first.health is Health.BROKEN
    assert "onnxruntime, onnxruntime-gpu" in first.detail
    assert "pip uninstall --yes onnxruntime onnxruntime-gpu" in first.remedy
    assert second.health is Health.OK


def test_none(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "distributions", list)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else real(name))
    (finding,) = onnxruntime()
    assert finding.health is Health.BROKEN
    assert "pip install onnxruntime" in finding.remedy


@pytest.mark.parametrize(
    ("runtime", "detail", "remedy"),
    [
        ({"version": "1.19.2"}, "1.20 or newer is needed", "--upgrade"),
        ({"providers": ["CUDAExecutionProvider"]}, "no CPUExecutionProvider", "--force-reinstall"),
        ({"version": None}, "exists without its files", "--force-reinstall"),
    ],
)
def test_a_runtime_that_will_not_do(monkeypatch, runtime, detail, remedy):
    fake_runtime(monkeypatch, **runtime)
    (finding,) = onnxruntime()
    assert finding.health is Health.BROKEN
    assert detail in finding.detail
    assert finding.consequence
    assert remedy in finding.remedy


def test_this_runtime_is_named_with_its_providers():
    (finding,) = onnxruntime()
    assert finding.health is Health.OK
    assert "CPUExecutionProvider" in finding.detail


def fake_torch(monkeypatch, cuda, is_available):
    module: Any = types.ModuleType("torch")
    module.__spec__ = importlib.util.spec_from_loader("torch", None)
    module.version = types.SimpleNamespace(cuda=cuda)
    names = ["NVIDIA A", "NVIDIA B"]
    module.cuda = types.SimpleNamespace(
        is_available=lambda: is_available, device_count=lambda: len(names), get_device_name=lambda number: names[number]
    )
    monkeypatch.setitem(sys.modules, "torch", module)


def test_torch_is_not_needed(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    (finding,) = torch()
    assert finding.health is Health.INFO


def test_torch_too_old_leaves_the_rest_working(monkeypatch):
    fake_torch(monkeypatch, None, False)
    set_version(monkeypatch, "torch", "2.5.1+cu121")
    (finding,) = torch()
    assert finding.health is Health.WARNING
    assert "torch>=2.6" in finding.remedy


@pytest.mark.parametrize(("cuda", "is_available", "count"), [("12.8", False, 2), ("12.8", True, 2), (None, False, 1)])
def test_a_build_for_cuda_without_a_driver(monkeypatch, cuda, is_available, count):
    fake_torch(monkeypatch, cuda, is_available)
    set_version(monkeypatch, "torch", "2.9.0")
    findings = list(torch())
    assert len(findings) == count
    if is_available:
        assert findings[1].health is Health.OK
        assert "NVIDIA A, NVIDIA B" in findings[1].detail
    elif cuda is not None:
        assert findings[1].health is Health.WARNING
        assert "12.8" in findings[1].detail
        assert "nvidia-smi" in findings[1].remedy
