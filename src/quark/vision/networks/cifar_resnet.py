"""ResNet for pictures of 32x32 (arXiv 1512.03385, section 4.2): three stages of 16, 32 and 64 channels.

Shortcuts have no parameters ("option A"): every other pixel, and zeros for the channels that are new. The names are
those of the state dicts that are in circulation (conv1, layer1.0.bn1, linear).
"""

from __future__ import annotations

from torch import Tensor, nn

CHANNELS = (16, 32, 64)


class CifarBlock(nn.Module):
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
    """`blocks` in each stage: 3 give ResNet-20."""

    def __init__(self, blocks: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, CHANNELS[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(CHANNELS[0])
        inputs = CHANNELS[0]
        for stage, channels in enumerate(CHANNELS, start=1):
            layers = []
            for number in range(blocks):
                layers.append(CifarBlock(inputs, channels, 2 if stage > 1 and number == 0 else 1))
                inputs = channels
            setattr(self, f"layer{stage}", nn.Sequential(*layers))
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.bn1(self.conv1(x)))
        for stage in range(1, len(CHANNELS) + 1):
            x = getattr(self, f"layer{stage}")(x)
        scores: Tensor = self.linear(nn.functional.adaptive_avg_pool2d(x, (1, 1)).flatten(1))
        return scores


def cifar_resnet20(classes: int = 10) -> nn.Module:
    return CifarResNet(3, classes)
