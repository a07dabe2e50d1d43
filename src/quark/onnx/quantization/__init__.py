"""Quantizing an ONNX model: configuration, presets, and the pipeline that carries them out."""

from importlib import import_module
from typing import Any

# Scripts import these from here. They load when asked for: this package is imported on the way to each of them.
_LAZY = {
    **dict.fromkeys(
        ("AdaQuantConfig", "AdaRoundConfig", "AlgoConfig", "AutoMixprecisionConfig", "DistillationConfig")
        + ("BiasCorrectionConfig", "CLEConfig", "GPTQConfig", "QuarotConfig", "SmoothQuantConfig"),
        "quark.onnx.quantization.config.algorithm",
    ),
    "Config": "quark.onnx.quantization.config",
    "ModelQuantizer": "quark.onnx.quantization.quantizer",
    "QConfig": "quark.onnx.quantization.config",
    "QuantizationConfig": "quark.onnx.quantization.config",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
