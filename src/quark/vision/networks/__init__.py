"""Image classifiers by name, for torchvision's weights but without torchvision.

NETWORKS        name -> function of the number of classes
load_network    a network with the weights from a file
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from quark.errors import unknown_name
from quark.vision.networks.architectures import BasicBlock, Bottleneck, CifarResNet, MobileNetV2, ResNet, Variant
from quark.vision.tensor_file import fill, read_weights

Build = Callable[[int], nn.Module]

NETWORKS: Mapping[str, Build] = {
    "resnet18": lambda classes: ResNet(BasicBlock, (2, 2, 2, 2), classes),
    "resnet34": lambda classes: ResNet(BasicBlock, (3, 4, 6, 3), classes),
    "resnet50": lambda classes: ResNet(Bottleneck, (3, 4, 6, 3), classes),  # torchvision's, also called v1.5
    # as first published, with the epsilon of Keras, the source of such weights
    "resnet50_v1": lambda classes: ResNet(
        Bottleneck, (3, 4, 6, 3), classes, Variant(has_stride_first=True, epsilon=1e-3)
    ),
    "mobilenetv2": MobileNetV2,
    "cifar_resnet20": lambda classes: CifarResNet(3, classes),
}


def build_network(name: str, classes: int) -> nn.Module:
    """Return an untrained network."""
    if name not in NETWORKS:
        raise unknown_name("network", name, NETWORKS)
    return NETWORKS[name](classes)


def load_network(name: str, path: Path) -> nn.Module:
    """Return a network in evaluation mode. The last bias in the file determines the number of classes."""
    if name not in NETWORKS:
        raise unknown_name("network", name, NETWORKS)
    weights = read_weights(path)
    # every network here ends in a linear layer, whose bias has one entry per class
    last = weights[list(weights)[-1]]
    network = build_network(name, classes=len(last) if last.ndim == 1 else 1000)
    fill(network, weights, f"'{path}' for {name}")
    return network.eval()


__all__ = ["NETWORKS", "build_network", "load_network"]
