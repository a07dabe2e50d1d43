"""The time of a training step of whole quantized networks, relative to the same networks in float, in one run.

    python -m bench.qat_flow [--device cpu|cuda] [--networks resnet18 resnet50 mobilenetv2 cifar_resnet20]
                             [--methods int8 w4a4 mxfp4 nvfp4 tqt] [--modes eager compiled graph] [--batch 64]
                             [--image 224] [--steps 5] [--repeat 5] [--channels-last] [--autocast]

The benchmark trains the complete result of `ModelQuantizer.quantize_model`: folded batch norms, scales that follow
weights, quantizers on every tensor that a recipe names. `bench.qat_step` measures the quantizers alone. Networks are
built here and weights and images are random, so nothing is downloaded.

    int8     8 bits, learned steps: one for each output channel of a weight, one for each activation that a layer reads
    w4a4     the same with 4 bits, and 8 in the first and the last layer
    mxfp4    MXFP4 for both operands of every product
    nvfp4    NVFP4 for both operands of every product
    tqt      8 bits, powers of two, learned thresholds; inputs, outputs and biases too, as an NPU takes them

Modes: eager; torch.compile, on both networks; or the step captured as a CUDA graph, which excludes the kernel launches
of small networks from the figure. The float network takes its turns beside every method, in every mode: a row has its
own relation to float in the same mode, and to eager float.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch
from torch import nn

from bench.cells import times, with_spread
from bench.devices import describe_device
from bench.qat_cifar import blocks
from bench.qat_step import captured, turns_of
from bench.record import Record, add_record_arguments, say
from bench.timing import Timing
from quark.torch import ModelQuantizer
from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
from quark.torch.quantization.config.type import Dtype, QSchemeType
from quark.torch.quantization.observer import LSQObserver
from quark.vision.networks import NETWORKS, build_network
from quark.vision.quantizing import Method, recipe

CLASSES = 1000
FLOAT, EAGER = "float", "eager"
MODES = (EAGER, "compiled", "graph")
HEADER = ["network", "mode", "method", "ms", "of float", "of eager float"]
Step = Callable[[], None]


def learned(activation: Dtype, weight: Dtype, ends: str | None = None) -> Config:
    """Learned steps for what every product reads, with one for each output channel of a weight."""
    tensors = QuantizationSpec(activation, LSQObserver, qscheme=QSchemeType.per_tensor, symmetric=True)
    channels = QuantizationSpec(weight, LSQObserver, qscheme=QSchemeType.per_channel, ch_axis=0, symmetric=True)
    return Config(QuantizationConfig(tensors, weight=channels), algo_config=[], keep_first_last=ends)


METHODS: Mapping[str, Callable[[], Config]] = {
    "int8": lambda: learned(Dtype.int8, Dtype.int8),
    "w4a4": lambda: learned(Dtype.int4, Dtype.int4, "int8"),
    "mxfp4": lambda: blocks(Dtype.fp4),
    "nvfp4": lambda: blocks(Dtype.nvfp4),
    "tqt": lambda: recipe(Method.TQT),
}


def make_step(model: nn.Module, x: torch.Tensor, mode: str, *, is_autocast: bool) -> Step:
    """A step of training, ready to be repeated."""
    model.train()
    run = torch.compile(model) if mode == "compiled" else model
    y = torch.arange(len(x), device=x.device) % CLASSES
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9, foreach=True)

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=is_autocast):
            loss = nn.functional.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return captured(step) if mode == "graph" else step


class Bench:
    """The float network with a step for each mode, and the quantized ones made from it."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.name, self.arguments = name, arguments
        size = 32 if name.startswith("cifar") else arguments.image
        layout = torch.channels_last if arguments.channels_last else torch.contiguous_format
        self.x = torch.randn(arguments.batch, 3, size, size, device=arguments.device).to(memory_format=layout)
        self.network = build_network(name, CLASSES).to(arguments.device).eval()
        self.float_steps = {mode: self._ready(FLOAT, mode, build_network(name, CLASSES)) for mode in arguments.modes}

    def measure(self, method: str) -> dict[str, Timing]:
        """Seconds of a step by mode and method, in turns taken side by side."""
        quantized = ModelQuantizer(METHODS[method]()).quantize_model(self.network, [self.x[:8]])
        steps = {f"{mode} {FLOAT}": step for mode, step in self.float_steps.items()}
        for mode in self.arguments.modes:
            steps[f"{mode} {method}"] = self._ready(method, mode, copy.deepcopy(quantized))
        return turns_of(steps, self.arguments)

    def rows(self, method: str, timings: Mapping[str, Timing]) -> list[list[str]]:
        eager = timings.get(f"{EAGER} {FLOAT}")
        found = []
        for mode in self.arguments.modes:
            whole = timings[f"{mode} {FLOAT}"]
            for what in (FLOAT, method):
                own = timings[f"{mode} {what}"]
                relations = (times(own.best, whole.best), times(own.best, eager and eager.best))
                found.append([self.name, mode, what, with_spread(own, 1e3), *relations])
        return found

    def _ready(self, method: str, mode: str, model: nn.Module) -> Step:
        """The step after two runs, the first of which compiles."""
        model = model.to(self.arguments.device)
        if self.arguments.channels_last:
            model = nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
        start = time.perf_counter()
        step = make_step(model, self.x, mode, is_autocast=self.arguments.autocast)
        for _ in range(2):
            step()
        if self.arguments.device == "cuda":
            torch.cuda.synchronize()
        say(f"{self.name}, {mode}, {method}: ready after {time.perf_counter() - start:.0f} s")
        return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--networks", nargs="+", choices=sorted(NETWORKS), default=["cifar_resnet20"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[EAGER])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--image", type=int, default=224, help="pixels, for networks that are not CIFAR's")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--autocast", action="store_true", help="bfloat16")
    add_record_arguments(parser)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    where = f"On {describe_device(arguments.device)}, batch {arguments.batch}, images of {arguments.image}"
    notes = [f"{where} (CIFAR's of 32); best of {arguments.repeat} turns of {arguments.steps} steps."]
    record = Record.begin("qat_flow", arguments, HEADER, notes)
    for name in arguments.networks:
        bench = Bench(name, arguments)
        for method in arguments.methods:
            timings = bench.measure(method)
            rows = bench.rows(method, timings)
            seconds = {key: asdict(timing) for key, timing in timings.items()}
            record.add(rows, {"network": name, "method": method, "seconds": seconds})
            say("\n".join(" | ".join(row) for row in rows))
            gc.collect()
    record.finish()


if __name__ == "__main__":
    main()
