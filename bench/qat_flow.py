"""The time of a training step of whole quantized networks, relative to the same networks in float, in one run.

    python -m bench.qat_flow [--device cpu|cuda] [--networks cifar_resnet20 mobilenetv2] [--methods tqt lsq4 ...]
                             [--batch 128] [--image 96] [--steps 5] [--repeat 5] [--modes eager compiled graph]
                             [--channels-last]

The benchmark trains the complete result of `ModelQuantizer.quantize_model`: folded batch norms, scales that follow
weights, quantizers on every tensor. `bench.qat_step` measures the quantizers alone. Weights are random. Modes: eager;
both networks by torch.compile; or the step captured as a CUDA graph, which excludes the kernel launches of small
networks from the figure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import nn

from bench.devices import describe_device
from bench.qat_cifar import RECIPES
from bench.qat_step import HEADER, captured, rows_of, turns_of
from bench.record import Record, add_record_arguments
from bench.timing import Timing
from quark.torch import ModelQuantizer
from quark.vision.networks import build_network

CLASSES = 10


def make_step(model: nn.Module, x: torch.Tensor, mode: str) -> Callable[[], None]:
    """A step of training, ready to be repeated."""
    model.train()
    run = torch.compile(model) if mode == "compiled" else model
    y = torch.arange(len(x), device=x.device) % CLASSES
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9, foreach=True)

    def step() -> None:
        nn.functional.cross_entropy(run(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return captured(step) if mode == "graph" else step


def measure(name: str, mode: str, arguments: argparse.Namespace) -> dict[str, Timing]:
    """Seconds of a step by method, in turns taken side by side."""
    torch.manual_seed(0)
    size = 32 if name.startswith("cifar") else arguments.image
    x = torch.randn(arguments.batch, 3, size, size, device=arguments.device)
    layout = torch.channels_last if arguments.channels_last else torch.contiguous_format
    x = x.to(memory_format=layout)
    network = build_network(name, CLASSES).to(arguments.device, memory_format=layout).eval()
    networks = {"float": network} | {
        method: ModelQuantizer(RECIPES[method].config()).quantize_model(network, [x[:32]])
        for method in arguments.methods
    }
    steps = {method: make_step(each, x, mode) for method, each in networks.items()}
    for step in steps.values():
        step()
    return turns_of(steps, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--networks", nargs="+", default=["cifar_resnet20"])
    parser.add_argument("--methods", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled", "graph"], default=["eager"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--image", type=int, default=96, help="pixels, for networks that are not CIFAR's")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--channels-last", action="store_true")
    add_record_arguments(parser)
    arguments = parser.parse_args()
    notes = [f"On {describe_device(arguments.device)}, batch {arguments.batch}; best of {arguments.repeat} turns."]
    record = Record.begin("qat_flow", arguments, HEADER, notes)
    for name in arguments.networks:
        for mode in arguments.modes:
            torch._dynamo.reset()
            timings = measure(name, mode, arguments)
            figure = {"network": name, "mode": mode, "seconds": {key: asdict(each) for key, each in timings.items()}}
            record.add(rows_of(name, mode, timings), figure)
    record.finish()


if __name__ == "__main__":
    main()
