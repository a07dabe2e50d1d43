"""Image classifiers by name, without torchvision: its weights fit, its code is not needed.

NETWORKS        name -> function of the number of classes
load_network    a network with the weights of a file
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from quark.errors import unknown_name
from quark.vision.networks.cifar_resnet import cifar_resnet20
from quark.vision.networks.mobilenet_v2 import mobilenet_v2
from quark.vision.networks.resnet import resnet18, resnet34, resnet50, resnet50_v1
from quark.vision.networks.weights import fill, read_weights

Build = Callable[[int], nn.Module]

NETWORKS: Mapping[str, Build] = {
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet50_v1": resnet50_v1,
    "mobilenetv2": mobilenet_v2,
    "cifar_resnet20": cifar_resnet20,
}


def build_network(name: str, classes: int) -> nn.Module:
    """An untrained network."""
    if name not in NETWORKS:
        raise unknown_name("network", name, NETWORKS)
    return NETWORKS[name](classes)


def load_network(name: str, path: Path) -> nn.Module:
    """In evaluation mode. The number of classes is that of the last bias in the file."""
    if name not in NETWORKS:
        raise unknown_name("network", name, NETWORKS)
    weights = read_weights(path)
    # every network here ends in a linear layer, whose bias has one entry for each class
    last = weights[list(weights)[-1]]
    network = build_network(name, classes=len(last) if last.ndim == 1 else 1000)
    fill(network, weights, f"'{path}' for {name}")
    return network.eval()


__all__ = ["NETWORKS", "build_network", "load_network"]
