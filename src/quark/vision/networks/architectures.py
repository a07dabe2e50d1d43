"""ResNet (arXiv 1512.03385) and MobileNet-V2 (arXiv 1801.04381), with the names and shapes of known state dicts.

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
    """The position of the stride in a bottleneck, and the epsilon of batch norms."""

    has_stride_first: bool = False
    epsilon: float = 1e-5

    def batch_norm(self, channels: int) -> nn.BatchNorm2d:
        return nn.BatchNorm2d(channels, eps=self.epsilon)

    def shortcut(self, inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
        """Return the layers that bring a block's input to the shape of its output; None if they are the same."""
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


CIFAR_CHANNELS = (16, 32, 64)


class CifarBlock(nn.Module):
    """Two 3x3 convolutions, with a shortcut without parameters."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride, self.new_channels = stride, channels - inputs

    def forward(self, x: Tensor) -> Tensor:
        result = nn.functional.relu(self.bn1(self.conv1(x)))
        return nn.functional.relu(self.bn2(self.conv2(result)) + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if not self.new_channels:
            return x
        before = self.new_channels // 2
        kept = x[:, :, :: self.stride, :: self.stride]
        return nn.functional.pad(kept, (0, 0, 0, 0, before, self.new_channels - before))


class CifarResNet(nn.Module):
    """ResNet for images of 32x32 (section 4.2): three stages of 16, 32 and 64 channels; 3 `blocks` make ResNet-20.

    Shortcuts have no parameters ("option A"): every other pixel, and zeros for new channels. The names are those of
    common state dicts (conv1, layer1.0.bn1, linear).
    """

    def __init__(self, blocks: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, CIFAR_CHANNELS[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(CIFAR_CHANNELS[0])
        inputs = CIFAR_CHANNELS[0]
        for stage, channels in enumerate(CIFAR_CHANNELS, start=1):
            layers = []
            for number in range(blocks):
                layers.append(CifarBlock(inputs, channels, 2 if stage > 1 and number == 0 else 1))
                inputs = channels
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.bn1(self.conv1(x)))
        for stage in range(1, len(CIFAR_CHANNELS) + 1):
            x = getattr(self, f"layer{stage}")(x)
        scores: Tensor = self.linear(nn.functional.adaptive_avg_pool2d(x, (1, 1)).flatten(1))
        return scores


MOBILENET_FIRST_CHANNELS, MOBILENET_LAST_CHANNELS = 32, 1280
# expansion, channels, blocks, stride of the first block
MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class ConvBatchNormRelu6(nn.Sequential):
    """A convolution, a batch norm and a ReLU6."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    """Widens by a 1x1 convolution, filters each channel by itself, and narrows again without an activation.

    The input is added if it has the shape of the output.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        layers: list[nn.Module] = [] if expansion == 1 else [ConvBatchNormRelu6(inputs, hidden, kernel=1)]
        layers += [
            ConvBatchNormRelu6(hidden, hidden, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.conv(x)
        return x + result if self.has_shortcut else result


class MobileNetV2(nn.Module):
    """Scores of `classes` for images [n, 3, height, width]; sides should be multiples of 32."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [ConvBatchNormRelu6(3, MOBILENET_FIRST_CHANNELS, stride=2)]
        channels = MOBILENET_FIRST_CHANNELS
        for expansion, outputs, blocks, stride in MOBILENET_STAGES:
            for block in range(blocks):
                layers.append(InvertedResidual(channels, outputs, stride if block == 0 else 1, expansion))
                channels = outputs
        layers.append(ConvBatchNormRelu6(channels, MOBILENET_LAST_CHANNELS, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(MOBILENET_LAST_CHANNELS, classes))

    def forward(self, x: Tensor) -> Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(self.features(x), (1, 1)).flatten(1)
        scores: Tensor = self.classifier(pooled)
        return scores
