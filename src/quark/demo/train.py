"""Train the demo network and write its ONNX file: python -m quark.demo.train [OUTPUT.onnx]

Cross entropy with label smoothing, AdamW, one cosine cycle; each image is moved by up to one pixel. Seeds are fixed
and one thread is used, so that a machine repeats itself; another kind of CPU may round differently.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn
from torch.nn import functional

from quark.demo.digits import GREY_LEVELS, HELD_OUT_COUNT, SPLIT_SEED, Digits, load_digits
from quark.demo.mobilenet import DigitsMobileNet, to_onnx
from quark.demo.network import network_path

LOG_EPOCHS = 10


@dataclass(frozen=True)
class Training:
    """How the network is trained."""

    seed: int = 0
    epochs: int = 60
    batch_size: int = 64
    learning_rate: float = 4e-3
    weight_decay: float = 0.02
    label_smoothing: float = 0.05


def train(digits: Digits, options: Training) -> DigitsMobileNet:
    """A network trained on `digits`, in evaluation mode."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    images, labels = torch.from_numpy(digits.images), torch.from_numpy(digits.labels)
    network = DigitsMobileNet()
    optimizer = torch.optim.AdamW(network.parameters(), options.learning_rate, weight_decay=options.weight_decay)
    steps = options.epochs * (len(digits) // options.batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
    for epoch in range(options.epochs):
        total = 0.0
        # the rest that makes no whole batch is left out: it is another one in every epoch
        order = torch.randperm(len(digits))[: steps // options.epochs * options.batch_size]
        for batch in order.reshape(-1, options.batch_size):
            loss = loss_of(network(shifted(images[batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        if (epoch + 1) % LOG_EPOCHS == 0:
            sys.stderr.write(f"epoch {epoch + 1} of {options.epochs}: loss {total / len(order):.4f}\n")
    return network.eval()


def shifted(images: Tensor) -> Tensor:
    """Each image moved by -1, 0 or 1 pixel in both directions, zeros moving in."""
    count, _, height, width = images.shape
    padded = functional.pad(images, (1, 1, 1, 1))
    rows = torch.randint(0, 3, (count, 1)) + torch.arange(height)
    columns = torch.randint(0, 3, (count, 1)) + torch.arange(width)
    lines = padded[torch.arange(count)[:, None], 0, rows]
    return lines.gather(2, columns[:, None].expand(-1, height, -1))[:, None]


def accuracy(network: DigitsMobileNet, digits: Digits) -> float:
    """The share of `digits` that the network names right."""
    with torch.no_grad():
        named = network(torch.from_numpy(digits.images)).argmax(1).numpy()
    return float(np.mean(named == digits.labels))


def main(output: Path) -> None:
    """Train, measure on the held-out part, write."""
    training, held_out = load_digits()
    options = Training()
    network = train(training, options)
    percent = 100 * accuracy(network, held_out)
    metadata = {
        "data": "scikit-learn load_digits: 1797 images of 8x8 pixels",
        "preprocessing": f"grey values divided by {GREY_LEVELS:g}, float32 [N, 1, 8, 8]",
        "split": f"numpy.random.RandomState(split_seed).permutation(1797); the last {HELD_OUT_COUNT} are held out",
        "split_seed": str(SPLIT_SEED),
        "training_seed": str(options.seed),
        "held_out_accuracy_percent": f"{percent:.2f}",
        "made_by": "python -m quark.demo.train",
    }
    onnx.save(to_onnx(network, metadata), output)
    sys.stderr.write(f"{output}: {output.stat().st_size} bytes, {percent:.2f} % of {len(held_out)} held-out images\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else network_path())
