"""The time of a training step through fake quantizers, relative to float training, on one device in one run.

    python -m bench.qat_step [--device cpu|cuda] [--networks resnet20 mobilenet] [--methods float affine lsq ...]
                             [--batch 128] [--image 96] [--steps 5] [--repeat 5] [--modes eager compiled graph]
                             [--per-channel] [--channels-last] [--autocast]

Every convolution and linear layer has a quantizer on its weight, and every activation has one. The networks are
otherwise plain, so the figures show the quantizers in quark.ops.fake_quantize. A step is forward, loss, backward and
SGD on random images. Modes: eager; torch.compile; the step captured as a CUDA graph. Methods alternate, and the best
time is shown. The benchmark needs only torch and quark: PYTHONPATH=src is enough.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict

import torch
from torch import nn

from bench.cells import times, with_spread
from bench.devices import describe_device
from bench.record import Record, add_record_arguments
from bench.timing import Timing
from quark.formats.affine import AffineParameters, integer_format
from quark.ops.fake_quantize import affine_fake_quantize, block_fake_quantize, lsq, tqt

METHODS = ("float", "affine", "lsq", "tqt", "mxfp4", "mx6")
BLOCKS = {"mxfp4": "mxfp4_e2m1", "mx6": "mx6"}
HEADER = ["network", "mode", "method", "ms", "of float"]
STEP, LOG2_THRESHOLD = 0.05, 2.0
CLASSES = 10


class Quantizer(nn.Module):
    """One fake quantizer of the method; `channels` of a weight, where each has a parameter of its own."""

    def __init__(self, method: str, channels: int | None = None) -> None:
        super().__init__()
        self.method = method
        self.axis = None if channels is None else 0
        shape = () if channels is None else (channels,)
        if method in ("lsq", "tqt"):
            self.parameter = nn.Parameter(torch.full(shape, STEP if method == "lsq" else LOG2_THRESHOLD))
        if method == "affine":
            self.register_buffer("scale", torch.full(shape, STEP))
            self.register_buffer("zero_point", torch.zeros(shape, dtype=torch.int32))

    def settle(self) -> None:
        """Once on its device: fixed parameters are checked when they are made, not at every step."""
        if self.method == "affine":
            self.fixed = AffineParameters(self.scale, self.zero_point, integer_format("int8"), self.axis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.method == "affine":
            return affine_fake_quantize(x, self.fixed)
        if self.method == "lsq":
            return lsq(x, self.parameter, 8, True, self.axis)
        if self.method == "tqt":
            return tqt(x, self.parameter, 8, True, self.axis)
        return block_fake_quantize(x, BLOCKS[self.method], 1)


class Convolution(nn.Conv2d):
    """With a quantizer on its weight."""

    quantizer: Quantizer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, self.quantizer(self.weight), self.bias)


class Linear(nn.Linear):
    """With a quantizer on its weight."""

    quantizer: Quantizer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.quantizer(self.weight), self.bias)


class Layers:
    """Makes the layers of a network for one method."""

    def __init__(self, method: str, is_per_channel: bool) -> None:
        self.method = method
        self.is_per_channel = is_per_channel

    def activation(self, *modules: nn.Module) -> list[nn.Module]:
        return [*modules] if self.method == "float" else [*modules, Quantizer(self.method)]

    def convolution(self, inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
        kind = nn.Conv2d if self.method == "float" else Convolution
        layer = kind(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
        return [self._weighted(layer, outputs), nn.BatchNorm2d(outputs)]

    def linear(self, inputs: int) -> nn.Module:
        kind = nn.Linear if self.method == "float" else Linear
        return self._weighted(kind(inputs, CLASSES), CLASSES)

    def _weighted(self, layer: nn.Module, channels: int) -> nn.Module:
        if self.method != "float":
            layer.quantizer = Quantizer(self.method, channels if self.is_per_channel else None)
        return layer


class Residual(nn.Module):
    """A body with a way around it."""

    def __init__(self, body: Iterable[nn.Module], around: Iterable[nn.Module], after: Iterable[nn.Module]) -> None:
        super().__init__()
        self.body, self.around, self.after = nn.Sequential(*body), nn.Sequential(*around), nn.Sequential(*after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.after(self.body(x) + self.around(x))
        return result


def resnet20(make: Layers) -> nn.Module:
    """CIFAR's, with a convolution where the shape changes."""
    stages: list[nn.Module] = [*make.activation(), *make.convolution(3, 16, 3), *make.activation(nn.ReLU())]
    width = 16
    for outputs, first in ((16, 1), (32, 2), (64, 2)):
        for stride in (first, 1, 1):
            body = [*make.convolution(width, outputs, 3, stride), *make.activation(nn.ReLU())]
            body += make.convolution(outputs, outputs, 3)
            around = [] if width == outputs else make.convolution(width, outputs, 1, stride)
            stages.append(Residual(body, around, make.activation(nn.ReLU())))
            width = outputs
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), make.linear(width))


# expansion, channels, blocks, stride: MobileNet-V2's table
INVERTED = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenet(make: Layers) -> nn.Module:
    stages: list[nn.Module] = [*make.activation(), *make.convolution(3, 32, 3, 2), *make.activation(nn.ReLU6())]
    width = 32
    for expansion, outputs, blocks, first in INVERTED:
        for stride in (first,) + (1,) * (blocks - 1):
            wide = width * expansion
            body = [] if expansion == 1 else [*make.convolution(width, wide, 1), *make.activation(nn.ReLU6())]
            body += [*make.convolution(wide, wide, 3, stride, wide), *make.activation(nn.ReLU6())]
            body += [*make.convolution(wide, outputs, 1), *make.activation()]
            is_residual = stride == 1 and width == outputs
            stages += [Residual(body, [], make.activation())] if is_residual else body
            width = outputs
    stages += [*make.convolution(width, 1280, 1), *make.activation(nn.ReLU6()), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*stages, nn.Flatten(), make.linear(1280))


NETWORKS: dict[str, Callable[[Layers], nn.Module]] = {"resnet20": resnet20, "mobilenet": mobilenet}


def make_step(name: str, method: str, mode: str, arguments: argparse.Namespace) -> Callable[[], None]:
    """A step of training, ready to be repeated."""
    torch.manual_seed(0)
    device = torch.device(arguments.device)
    layout = torch.channels_last if arguments.channels_last else torch.contiguous_format
    model = NETWORKS[name](Layers(method, arguments.per_channel)).to(device).train()
    model = nn.utils.convert_conv2d_weight_memory_format(model, layout)
    for module in model.modules():
        if isinstance(module, Quantizer):
            module.settle()
    size = 32 if name == "resnet20" else arguments.image
    x = torch.randn(arguments.batch, 3, size, size, device=device).to(memory_format=layout)
    y = torch.randint(0, CLASSES, (arguments.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=True)
    run = torch.compile(model) if mode == "compiled" else model

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=arguments.autocast):
            loss = nn.functional.cross_entropy(run(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return captured(step) if mode == "graph" else step


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph, after some on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(_step: Callable[[], None] = step) -> None:  # the step holds the memory that the graph works on
        graph.replay()

    return replay


def seconds_of(step: Callable[[], None], arguments: argparse.Namespace) -> float:
    """The mean of some steps in a row."""
    start = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / arguments.steps


def turns_of(steps: Mapping[str, Callable[[], None]], arguments: argparse.Namespace) -> dict[str, Timing]:
    """Seconds of a step by method, in turns taken side by side."""
    seconds: dict[str, list[float]] = {method: [] for method in steps}
    for _ in range(arguments.repeat):
        for method, step in steps.items():
            seconds[method].append(seconds_of(step, arguments))
    return {method: Timing.of(second) for method, second in seconds.items()}


def rows_of(name: str, mode: str, timings: Mapping[str, Timing]) -> list[list[str]]:
    """A row for each method; without float among them there is nothing to compare with."""
    whole = timings["float"].best if "float" in timings else None
    return [
        [name, mode, method, with_spread(timing, 1e3), times(timing.best, whole)] for method, timing in timings.items()
    ]


def measure(name: str, mode: str, arguments: argparse.Namespace) -> dict[str, Timing]:
    """Seconds of a step by method."""
    steps = {method: make_step(name, method, mode, arguments) for method in arguments.methods}
    for step in steps.values():
        for _ in range(2):
            step()
    return turns_of(steps, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="float is the reference")
    parser.add_argument("--modes", nargs="+", choices=["eager", "compiled", "graph"], default=["eager"])
    parser.add_argument("--batch", type=int, default=128, help="(%(default)s)")
    parser.add_argument("--image", type=int, default=96, help="pixels of the MobileNet's images (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps in a row (%(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="turns; the best counts (%(default)s)")
    parser.add_argument("--per-channel", action="store_true", help="a parameter for each channel of a weight")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--autocast", action="store_true", help="bfloat16")
    add_record_arguments(parser)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.backends.cudnn.benchmark = True
    where = f"On {describe_device(arguments.device)}, batch {arguments.batch}, MobileNet's images of {arguments.image}."
    record = Record.begin("qat_step", arguments, HEADER, [where, f"Best of {arguments.repeat} turns."])
    for name in arguments.networks:
        for mode in arguments.modes:
            torch._dynamo.reset()
            timings = measure(name, mode, arguments)
            figure = {
                "network": name,
                "mode": mode,
                "seconds": {key: asdict(timing) for key, timing in timings.items()},
            }
            record.add(rows_of(name, mode, timings), figure)
    record.finish()


if __name__ == "__main__":
    main()
