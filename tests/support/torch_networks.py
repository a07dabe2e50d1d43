"""Small networks of the kinds that people quantize, with batch statistics that are not those of a fresh module."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block that uses one in-place ReLU twice."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += shortcut
        return self.relu(y)


class SmallResNet(nn.Module):
    """Stem, max pooling, residual blocks, global pooling, dropout, linear layer."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(width, width), Block(width, width))
        self.layer2 = Block(width, 2 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(self.dropout(torch.flatten(x, 1)))


class InvertedResidual(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        hidden = 4 * inputs
        super().__init__(
            *(nn.Conv2d(inputs, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            *(nn.BatchNorm2d(hidden), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(hidden, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) if self.is_residual else super().forward(x)


class SmallMobileNet(nn.Module):
    """Depthwise convolutions, ReLU6, linear bottlenecks."""

    def __init__(self, width: int = 8, classes: int = 5) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU6(inplace=True)]
        blocks = [InvertedResidual(width, width, 1), InvertedResidual(width, 2 * width, 2)]
        self.features = nn.Sequential(*stem, *blocks)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(2 * width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class SmallViT(nn.Module):
    """Patches, a class token, position embeddings, attention."""

    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.1)
        self.encoders = nn.Sequential(Encoder(width, 2), Encoder(width, 2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.encoders(x))[:, 0])


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs), nn.ReLU())


class SmallUNet(nn.Module):
    """Pooling, a transposed convolution, upsampling, concatenation; the output is an image."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.down1, self.down2, self.down3 = _double(3, width), _double(width, 2 * width), _double(2 * width, 2 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2 = nn.ConvTranspose2d(2 * width, 2 * width, 2, 2)
        self.up1 = nn.Upsample(scale_factor=2, mode="nearest")
        self.join2, self.join1 = _double(4 * width, width), _double(2 * width, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        third = self.down3(self.pool(second))
        y = self.join2(torch.cat([self.up2(third), second], 1))
        return self.head(self.join1(torch.cat([self.up1(y), first], 1)))


class Reused(nn.Module):
    """One convolution and one activation used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, 1, 1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(self.act(self.conv(x))))


KINDS: dict[str, type[nn.Module]] = {
    "resnet": SmallResNet,
    "mobilenet": SmallMobileNet,
    "vit": SmallViT,
    "unet": SmallUNet,
    "reused": Reused,
}


def trained(kind: str, seed: int = 0) -> nn.Module:
    """A network of that kind in eval mode, with statistics and weights as training leaves them: all different."""
    torch.manual_seed(seed)
    model = KINDS[kind]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    return model.eval()


def images(count: int = 8, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 16, 16, generator=generator)
