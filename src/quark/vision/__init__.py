"""Image classifiers in PyTorch: networks for torchvision's weights, data, and training.

    quantize_classifier    from float weights to an ONNX file, with the accuracy of every step
    training.Trainer       a training loop for any module, in one process or with torchrun
    networks               resnet18, resnet34, resnet50, mobilenetv2
    data                   folders of images, and arrays

Needs torch, which is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quark.vision.quantizing import ClassifierQuantization, QuantizedClassifier, quantize_classifier

__all__ = ["ClassifierQuantization", "QuantizedClassifier", "quantize_classifier"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from quark.vision import quantizing

        return getattr(quantizing, name)
    raise AttributeError(f"module 'quark.vision' has no attribute {name!r}")
