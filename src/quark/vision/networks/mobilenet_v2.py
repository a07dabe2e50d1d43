"""MobileNet-V2 (arXiv 1801.04381), with the names and shapes of torchvision's state dict.

An inverted residual widens by a 1x1 convolution, filters each channel by itself, and narrows again without an
activation; where input and output have the same shape, they are added.
"""

from __future__ import annotations

from torch import Tensor, nn

FIRST_CHANNELS, LAST_CHANNELS = 32, 1280
# times wider inside, channels, blocks, stride of the first block
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


class ConvBatchNormRelu6(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
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
    """Scores of `classes` for images [n, 3, height, width]; sides that 32 divides lose nothing at the edges."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [ConvBatchNormRelu6(3, FIRST_CHANNELS, stride=2)]
        channels = FIRST_CHANNELS
        for expansion, outputs, blocks, stride in STAGES:
            for block in range(blocks):
                layers.append(InvertedResidual(channels, outputs, stride if block == 0 else 1, expansion))
                channels = outputs
        layers.append(ConvBatchNormRelu6(channels, LAST_CHANNELS, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(LAST_CHANNELS, classes))

    def forward(self, x: Tensor) -> Tensor:
        pooled = nn.functional.adaptive_avg_pool2d(self.features(x), (1, 1)).flatten(1)
        scores: Tensor = self.classifier(pooled)
        return scores


def mobilenet_v2(classes: int = 1000) -> nn.Module:
    return MobileNetV2(classes)
