"""ResNet (arXiv 1512.03385), with the names and shapes of torchvision's state dicts.

A bottleneck halves the picture in its 3x3 convolution, as torchvision does; the first publication, and Keras after it,
did so in the 1x1 convolution before that. The state dicts of both look the same, so `Variant` has to be known.
One ReLU module serves all places of a block, in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

FIRST_CHANNELS = 64
STAGE_CHANNELS = (64, 128, 256, 512)


@dataclass(frozen=True)
class Variant:
    """Where a bottleneck has its stride, and what keeps a batch norm from dividing by zero."""

    has_stride_first: bool = False
    epsilon: float = 1e-5

    def batch_norm(self, channels: int) -> nn.BatchNorm2d:
        return nn.BatchNorm2d(channels, eps=self.epsilon)

    def shortcut(self, inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
        """What brings a block's input to the shape of its output; None where it has it."""
        if stride == 1 and inputs == outputs:
            return None
        return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), self.batch_norm(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions."""

    EXPANSION: ClassVar[int] = 1

    def __init__(self, inputs: int, channels: int, stride: int, variant: Variant) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.bn1 = variant.batch_norm(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = variant.batch_norm(channels)
        self.downsample = variant.shortcut(inputs, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        result = self.relu(self.bn1(self.conv1(x)))
        result = self.bn2(self.conv2(result))
        result += x if self.downsample is None else self.downsample(x)
        activated: Tensor = self.relu(result)
        return activated


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the last of them four times as wide."""

    EXPANSION: ClassVar[int] = 4

    def __init__(self, inputs: int, channels: int, stride: int, variant: Variant) -> None:
        super().__init__()
        outputs = channels * self.EXPANSION
        first, second = (stride, 1) if variant.has_stride_first else (1, stride)
        self.conv1 = nn.Conv2d(inputs, channels, 1, first, bias=False)
        self.bn1 = variant.batch_norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, second, 1, bias=False)
        self.bn2 = variant.batch_norm(channels)
        self.conv3 = nn.Conv2d(channels, outputs, 1, bias=False)
        self.bn3 = variant.batch_norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = variant.shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        result = self.relu(self.bn1(self.conv1(x)))
        result = self.relu(self.bn2(self.conv2(result)))
        result = self.bn3(self.conv3(result))
        result += x if self.downsample is None else self.downsample(x)
        activated: Tensor = self.relu(result)
        return activated


class ResNet(nn.Module):
    """Scores of `classes` for images [n, 3, height, width]; `blocks` of each of the four stages."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
        classes: int = 1000,
        variant: Variant | None = None,
    ) -> None:
        super().__init__()
        variant = variant or Variant()
        self.conv1 = nn.Conv2d(3, FIRST_CHANNELS, 7, 2, 3, bias=False)
        self.bn1 = variant.batch_norm(FIRST_CHANNELS)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inputs = FIRST_CHANNELS
        for stage, (channels, count) in enumerate(zip(STAGE_CHANNELS, blocks, strict=True), start=1):
            layers = []
            for number in range(count):
                layers.append(block(inputs, channels, 2 if stage > 1 and number == 0 else 1, variant))
                inputs = channels * block.EXPANSION
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(1, len(STAGE_CHANNELS) + 1):
            x = getattr(self, f"layer{stage}")(x)
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


def resnet18(classes: int = 1000) -> nn.Module:
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet34(classes: int = 1000) -> nn.Module:
    return ResNet(BasicBlock, (3, 4, 6, 3), classes)


def resnet50(classes: int = 1000) -> nn.Module:
    """As torchvision has it: the stride on the 3x3 convolution, also called v1.5."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes)


def resnet50_v1(classes: int = 1000) -> nn.Module:
    """As first published, with the batch norms of Keras, from where weights of this kind come."""
    return ResNet(Bottleneck, (3, 4, 6, 3), classes, Variant(has_stride_first=True, epsilon=1e-3))
