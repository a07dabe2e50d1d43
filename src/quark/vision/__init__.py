"""Image classifiers from PyTorch: networks that take torchvision's weights, data, a trainer, and the run of them all.

    quantize_classifier    from float weights to an ONNX file, measured on the way
    training.Trainer       an ordinary training loop over any module, on one process or under torchrun
    networks               resnet18, resnet34, resnet50, mobilenetv2
    data                   folders of images, and arrays

Needs torch; nothing of it is imported before it is asked for.
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
