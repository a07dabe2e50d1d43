"""A step of training of whole quantized networks against the same networks in float: the ratio, in one run.

    python -m bench.qat_flow [--device cpu|cuda] [--networks cifar_resnet20 mobilenetv2] [--methods tqt lsq4 ...]
                             [--batch 128] [--image 96] [--steps 5] [--repeat 5] [--modes eager graph] [--json FILE]

What `ModelQuantizer.quantize_model` gives is trained, with all that belongs to it: folded batch norms, scales that
follow weights, quantizers on every tensor. `bench.qat_step` has the quantizers alone. Weights are random. Modes: eager,
or the step captured as a CUDA graph, which takes the launches of small networks out of the figure.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.qat_cifar import RECIPES
from bench.qat_step import captured
from bench.results import describe_machine, markdown, write_json
from quark.torch import ModelQuantizer
from quark.vision.networks import build_network

CLASSES = 10


def make_step(model: nn.Module, x: torch.Tensor, mode: str) -> Callable[[], None]:
    """A step of training, ready to be repeated."""
    model.train()
    y = torch.arange(len(x), device=x.device) % CLASSES
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9, foreach=True)

    def step() -> None:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return captured(step) if mode == "graph" else step


def measure(name: str, mode: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step by method: the best of turns taken side by side."""
    torch.manual_seed(0)
    size = 32 if name.startswith("cifar") else arguments.image
    x = torch.randn(arguments.batch, 3, size, size, device=arguments.device)
    network = build_network(name, CLASSES).to(arguments.device).eval()
    networks = {"float": network} | {
        method: ModelQuantizer(RECIPES[method].config()).quantize_model(network, [x[:32]])
        for method in arguments.methods
    }
    steps = {method: make_step(each, x, mode) for method, each in networks.items()}
    for step in steps.values():
        step()
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(arguments.repeat):
        for method, step in steps.items():
            best[method] = min(best[method], _seconds(step, arguments))
    return best


def _seconds(step: Callable[[], None], arguments: argparse.Namespace) -> float:
    start = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / arguments.steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--networks", nargs="+", default=["cifar_resnet20"])
    parser.add_argument("--methods", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--modes", nargs="+", choices=["eager", "graph"], default=["eager"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--image", type=int, default=96, help="pixels, for networks that are not CIFAR's")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.networks:
        for mode in arguments.modes:
            best = measure(name, mode, arguments)
            rows += [
                [name, mode, method, f"{1e3 * seconds:.2f}", f"{seconds / best['float']:.2f}"]
                for method, seconds in best.items()
            ]
    setting = f"{describe_machine()}, torch {torch.__version__} on {arguments.device}, batch {arguments.batch}"
    write_json(arguments, setting, rows)
    print(f"{setting}\n\n{markdown(('network', 'mode', 'method', 'ms', '/ float'), rows)}")


if __name__ == "__main__":
    main()
