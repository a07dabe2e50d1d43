"""Train a small vision transformer on CIFAR-10 for `bench.transformers`, in some minutes on one GPU.

    python bench/train_vit.py --data FILE.npz [FILE.npz ...] --out DIR [--minutes 3.4] [--steps N] [--device cuda]

The archives have train_x, train_y, test_x and test_y as for `bench.cifar_judge`; several are joined. The network is
a plain ViT: patches of 4, 7 blocks with LayerNorm first, 256 channels, 4 heads, GELU, the mean of all tokens in front
of the classifier; 5.6 million parameters. It is trained from scratch with flips, crops, small rotations and changes of
colour, mixup and CutMix. The product of the query and key weights begins near the identity, and that of the value and
output weights near the negative identity, which small data sets profit from (Trockman and Kolter, 2023).

The number of steps follows from the measured time of one, so that training takes `--minutes`. The test images are
looked at once, by the averaged weights at the end. DIR gets vit_cifar.onnx, vit_cifar.pt (the weights) and
vit_cifar.json (the accuracy and how it was trained). The script needs torch and numpy, and onnx for the export.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES, SIZE, PATCH = 10, 32, 4
CHANNELS, BLOCKS, HEADS, EXPANSION = 256, 7, 4, 4
WARM_UP, PLAIN = 0.05, 0.06  # shares of the steps: with a rising rate, and at the end without mixing
MEASURED = 100  # steps that tell how long one takes
AVERAGING = 0.999


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(CHANNELS, 3 * CHANNELS)
        self.out = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        count, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(count, tokens, 3, HEADS, CHANNELS // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(count, tokens, CHANNELS))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.attention = Attention()
        self.up = nn.Linear(CHANNELS, EXPANSION * CHANNELS)
        self.down = nn.Linear(EXPANSION * CHANNELS, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, CHANNELS, PATCH, PATCH)
        self.position = nn.Parameter(sine_positions(SIZE // PATCH, CHANNELS))
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(CHANNELS)
        self.head = nn.Linear(CHANNELS, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Attention):
                near_identity(module)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


def sine_positions(side: int, channels: int) -> Tensor:
    """Return [1, side * side, channels]: sines and cosines of the row, then of the column."""
    frequencies = 1 / 10000 ** (torch.arange(channels // 4) / (channels / 4))
    angles = torch.arange(side)[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    rows = waves[:, None].expand(side, side, -1)
    return torch.cat([rows, rows.transpose(0, 1)], dim=2).reshape(1, side * side, channels)


@torch.no_grad()
def near_identity(attention: Attention) -> None:
    """Begin with q k' near 0.7 of the identity in every head, and out v near -0.4 of it."""
    noise, identity = torch.randn, torch.eye(CHANNELS)
    width = CHANNELS // HEADS
    query, key, value = attention.qkv.weight.view(3, CHANNELS, CHANNELS).unbind(0)
    for head in range(HEADS):
        left, sizes, right = torch.linalg.svd(0.7 * noise(CHANNELS, CHANNELS) / CHANNELS**0.5 + 0.7 * identity)
        rows = slice(head * width, (head + 1) * width)
        query[rows] = (left[:, :width] * sizes[:width].sqrt()).T
        key[rows] = right[:width] * sizes[:width].sqrt()[:, None]
    left, sizes, right = torch.linalg.svd(0.4 * noise(CHANNELS, CHANNELS) / CHANNELS**0.5 - 0.4 * identity)
    attention.out.weight.copy_(left * sizes.sqrt())
    value.copy_(sizes.sqrt()[:, None] * right)


def augment(images: Tensor) -> Tensor:
    """Return images [n, 3, 32, 32] of 0 to 1: moved, mirrored, half of them also turned, half of them tinted."""
    count, device = len(images), images.device

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, device=device) * (high - low) + low

    turned = (torch.rand(count, device=device) < 0.5).float()
    angle, shear = uniform(-0.3, 0.3) * turned, uniform(-0.2, 0.2) * turned
    zoom = 1 + uniform(-0.15, 0.15) * turned
    mirror = torch.where(torch.rand(count, device=device) < 0.5, -1.0, 1.0)
    move_x, move_y = (torch.randint(-4, 5, (2, count), device=device) * (2 / SIZE)).unbind(0)
    first = torch.stack([mirror * zoom * angle.cos(), mirror * (shear - angle.sin()), move_x], dim=1)
    second = torch.stack([zoom * angle.sin(), zoom * angle.cos(), move_y], dim=1)
    grid = functional.affine_grid(torch.stack([first, second], dim=1), list(images.shape), align_corners=False)
    images = functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    tinted = (torch.rand(count, device=device) < 0.5).float()
    bright, contrast, colour = (
        (1 + uniform(-0.5, 0.5) * tinted).reshape(-1, 1, 1, 1) for _ in ("brightness", "contrast", "saturation")
    )
    images = images * bright
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = (images - mean) * contrast + mean
    gray = images.mean(dim=1, keepdim=True)
    return ((images - gray) * colour + gray).clamp(0, 1)


def rectangles(count: int, area: Tensor) -> Tensor:
    """Return masks [n, 1, 32, 32] that are true in a square of about this share of each image."""
    device = area.device
    half = area.sqrt() * SIZE / 2
    middle = torch.rand(2, count, device=device) * SIZE
    places = torch.arange(SIZE, device=device) + 0.5
    inside = (places[None, None] - middle[..., None]).abs() < half[None, :, None]
    return (inside[0][:, :, None] & inside[1][:, None, :])[:, None]


def mix(images: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Return images with others pasted in (half) or blended in (a third) or a part erased, and class probabilities."""
    count, device = len(images), images.device
    others = torch.randperm(count, device=device)
    pick = torch.rand(count, device=device)
    share = torch.rand(count, device=device)
    pasted, blended = pick < 0.5, (pick >= 0.5) & (pick < 0.8)
    mask = rectangles(count, share)
    covered = mask.float().mean(dim=(1, 2, 3))
    weight = torch.where(blended, share, 0.0).reshape(-1, 1, 1, 1)
    mixed = torch.where(mask & pasted.reshape(-1, 1, 1, 1), images[others], images.lerp(images[others], weight))
    erased = rectangles(count, torch.rand(count, device=device) * 0.25) & (pick >= 0.8).reshape(-1, 1, 1, 1)
    mixed = torch.where(erased, 0.0, mixed)  # 0 is the mean colour
    of_others = torch.where(pasted, covered, torch.where(blended, share, 0.0))[:, None]
    own = functional.one_hot(classes, CLASSES).float()
    return mixed, own.lerp(own[others], of_others)


class Batches:
    """Endless batches of augmented images; all images are changed at once at the beginning of an epoch."""

    def __init__(self, images: Tensor, classes: Tensor, batch: int) -> None:
        self.images, self.classes, self.batch = images, classes, batch
        self.mean, self.deviation = (
            torch.tensor(each, device=images.device).reshape(1, 3, 1, 1) for each in (MEAN, DEVIATION)
        )
        self.position = len(images)

    def normalize(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) / self.deviation

    def next(self, is_mixed: bool) -> tuple[Tensor, Tensor]:
        if self.position + self.batch > len(self.images):
            order = torch.randperm(len(self.images), device=self.images.device)
            self.epoch = (augment(self.images[order].float() / 255) - self.mean) / self.deviation
            self.epoch_classes, self.position = self.classes[order], 0
        part = slice(self.position, self.position + self.batch)
        self.position += self.batch
        images, classes = self.epoch[part], self.epoch_classes[part]
        return mix(images, classes) if is_mixed else (images, functional.one_hot(classes, CLASSES).float())


def train(arguments: argparse.Namespace, images: Tensor, classes: Tensor) -> tuple[VisionTransformer, int]:
    """Return the network with averaged weights, and the number of steps."""
    device = torch.device(arguments.device)
    model = VisionTransformer().to(device)
    average = VisionTransformer().to(device)
    average.load_state_dict(model.state_dict())
    pairs = list(average.parameters()), list(model.parameters())
    matrices = [each for each in pairs[1] if each.ndim > 1 and each is not model.position]
    others = [each for each in pairs[1] if each.ndim == 1 or each is model.position]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.rate, betas=(0.9, 0.98), fused=device.type == "cuda")
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch._dynamo.config.suppress_errors = True  # a machine without a compiler trains too, more slowly
    forward = torch.compile(model) if is_cuda else model
    batches = Batches(images, classes, arguments.batch)
    steps = arguments.steps or 10**9
    loss_sum, begun, step = torch.zeros((), device=device), 0.0, 0
    while step < steps:
        if step in (MEASURED // 5, MEASURED // 5 + MEASURED) and is_cuda:
            torch.cuda.synchronize()
            if step > MEASURED and not arguments.steps:
                seconds = (time.perf_counter() - begun) / MEASURED
                steps = int(arguments.minutes * 60 / seconds)
                print(f"{1000 * seconds:.2f} ms a step, {steps} steps", flush=True)
            begun = time.perf_counter()
        warm_up = min(WARM_UP * steps, 1000)
        rate = min(1.0, (step + 1) / warm_up) * 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.001
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * rate
        data, target = batches.next(step < (1 - PLAIN) * steps)
        with torch.autocast(device.type, torch.bfloat16, enabled=is_cuda):
            scores = forward(data)
        loss = functional.cross_entropy(scores.float(), target, label_smoothing=0.05)
        loss.backward()
        nn.utils.clip_grad_norm_(pairs[1], 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(*pairs, 1 - min(AVERAGING, (step + 1) / (step + 10)))
            loss_sum += loss.detach()
        step += 1
        if step % 1000 == 0 or step == steps:
            print(f"step {step}: loss {float(loss_sum) / (step % 1000 or 1000):.4f}", flush=True)
            loss_sum.zero_()
    return average.eval(), steps


@torch.no_grad()
def top1(model: nn.Module, images: Tensor, classes: Tensor) -> float:
    """Return how many percent of normalized images are classified right, in float32."""
    right = sum(
        int((model(part).argmax(dim=1) == truth).sum())
        for part, truth in zip(images.split(1000), classes.split(1000), strict=True)
    )
    return 100 * right / len(classes)


def read(files: list[Path], device: str) -> dict[str, Tensor]:
    """Return the arrays of all archives, images as [n, 3, 32, 32]."""
    archives = [np.load(file) for file in files]
    arrays: dict[str, Any] = {}
    for name in ("train_x", "train_y", "test_x", "test_y"):
        joined = torch.from_numpy(np.concatenate([archive[name] for archive in archives])).to(device)
        arrays[name] = joined.permute(0, 3, 1, 2).contiguous() if name.endswith("x") else joined.long()
    return arrays


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE.npz")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--minutes", type=float, default=3.4, metavar="N", help="of training (%(default)s)")
    parser.add_argument("--steps", type=int, metavar="N", help="a fixed number of steps instead")
    parser.add_argument("--batch", type=int, default=512, metavar="N", help="images a step (%(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, metavar="R", help="highest learning rate (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cpu" and not arguments.steps:
        raise SystemExit("--device cpu: give --steps as well; a CPU needs days for a whole training")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    arguments.out.mkdir(parents=True, exist_ok=True)
    arrays = read(arguments.data, arguments.device)
    begun = time.perf_counter()
    model, steps = train(arguments, arrays["train_x"], arrays["train_y"])
    minutes = (time.perf_counter() - begun) / 60
    torch.set_float32_matmul_precision("highest")
    normalized = Batches(arrays["train_x"], arrays["train_y"], arguments.batch).normalize(arrays["test_x"])
    accuracy = top1(model, normalized, arrays["test_y"])
    epochs = steps * arguments.batch / len(arrays["train_x"])
    print(f"test accuracy {accuracy:.2f} %, {steps} steps, {epochs:.1f} epochs, {minutes:.2f} minutes", flush=True)
    model.cpu()
    torch.save(model.state_dict(), arguments.out / "vit_cifar.pt")
    facts = {"top1_percent": accuracy, "steps": steps, "epochs": epochs, "minutes": minutes, "seed": arguments.seed}
    (arguments.out / "vit_cifar.json").write_text(json.dumps(facts, indent=2) + "\n")
    torch.onnx.export(
        model,
        (torch.zeros(2, 3, SIZE, SIZE),),
        str(arguments.out / "vit_cifar.onnx"),
        input_names=["x"],
        output_names=["scores"],
        dynamic_axes={"x": {0: "n"}, "scores": {0: "n"}},
        opset_version=17,
        dynamo=False,
    )


if __name__ == "__main__":
    main()
