"""ResNet-20 on CIFAR-10 quantized and trained by one tool, alone in its process; or steps of it, to be timed.

    python -I one_training.py JOB

JOB is JSON: who (ours, amd-quark-torch, brevitas), method (lsq8, lsq4, mxfp4), data, weights, images, calibration,
batch, epochs, learning_rate, distillation, device, threads, seed, turns, steps, result. With `epochs` 0 only steps are
timed.

It runs in the environment of the tool, so nothing of this folder is imported. The network, the images, their
augmentation, the loss and the optimizer are the same for all: SGD with Nesterov's momentum, half a cosine, cross
entropy and the distance from the float network. Steps of the float network and of the quantized one alternate, and the
best of the turns counts: so the relation does not depend on what else the machine does.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BATCH = 500  # to evaluate
PADDING = 4
Job = dict[str, Any]


class Block(nn.Module):
    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu2 = nn.ReLU()
        self.stride, self.more = stride, channels - inputs

    def forward(self, x: Tensor) -> Tensor:
        around = x
        if self.more:
            before = self.more // 2
            kept = x[:, :, :: self.stride, :: self.stride]
            around = functional.pad(kept, (0, 0, 0, 0, before, self.more - before))
        result: Tensor = self.relu2(self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x))))) + around)
        return result


class ResNet20(nn.Module):
    """With the names of common state dicts, and shortcuts without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.layer1 = nn.Sequential(*(Block(16, 16, 1) for _ in range(3)))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32, 1), Block(32, 32, 1))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64, 1), Block(64, 64, 1))
        self.pool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        result: Tensor = self.linear(self.flatten(self.pool(self.layer3(self.layer2(self.layer1(x))))))
        return result


def float_network(job: Job) -> nn.Module:
    content = torch.load(job["weights"], map_location="cpu", weights_only=True)
    state = {name.removeprefix("module."): each for name, each in content.get("state_dict", content).items()}
    network = ResNet20()
    network.load_state_dict(state)
    return network.to(job["device"]).eval()


def normalized(images: Tensor) -> Tensor:
    x = images.permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(value, device=x.device).reshape(1, 3, 1, 1) for value in (MEAN, STD))
    return (x - mean) / std


def batches(images: Tensor, labels: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in random order, shifted within a black border and possibly mirrored; whole batches only."""
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=random)
    for chosen in order[: len(order) // size * size].split(size):
        x = functional.pad(normalized(images[chosen.to(images.device)]), (PADDING,) * 4)
        down, right = torch.randint(2 * PADDING + 1, (2, size), generator=random).to(x.device)
        columns = torch.arange(32, device=x.device).expand(size, 32)
        is_mirrored = (torch.rand(size, generator=random) < 0.5).to(x.device)
        columns = torch.where(is_mirrored[:, None], 31 - columns, columns) + right[:, None]
        rows = torch.arange(32, device=x.device) + down[:, None]
        number = torch.arange(size, device=x.device)[:, None, None]
        moved = x.permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None]].permute(0, 3, 1, 2)
        yield moved.contiguous(), labels[chosen.to(labels.device)]


def top1(network: nn.Module, images: Tensor, labels: Tensor) -> float:
    """In percent. The network stays in evaluation mode."""
    network.eval()
    with torch.no_grad():
        right = [
            int((network(normalized(x)).argmax(1) == y).sum())
            for x, y in zip(images.split(BATCH), labels.split(BATCH), strict=True)
        ]
    return 100 * sum(right) / len(images)


def quantized_by_ours(network: nn.Module, method: str, calibration: list[Tensor]) -> tuple[nn.Module, Any]:
    """As bench.qat_cifar has it."""
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import Config, QuantizationConfig, QuantizationSpec
    from quark.torch.quantization.config.type import Dtype, QSchemeType
    from quark.torch.quantization.observer import LSQObserver

    def learned(dtype: Dtype) -> QuantizationSpec:
        is_signed = dtype.name.startswith("int")
        return QuantizationSpec(dtype, LSQObserver, qscheme=QSchemeType.per_tensor, symmetric=is_signed)

    def products(inputs: Dtype, weights: Dtype) -> QuantizationConfig:
        return QuantizationConfig(input_tensors=learned(inputs), weight=learned(weights))

    if method == "mxfp4":
        blocks = QuantizationSpec(Dtype.fp4)
        config = Config(QuantizationConfig(input_tensors=blocks, weight=blocks), algo_config=[])
    else:
        kinds = (Dtype.uint4, Dtype.int4) if method == "lsq4" else (Dtype.uint8, Dtype.int8)
        config = Config(
            QuantizationConfig(),
            algo_config=[],
            layer_type_quant_config={nn.Conv2d: products(*kinds)},
            layer_quant_config={
                "conv1": products(Dtype.int8, Dtype.int8),
                "linear": products(Dtype.uint8, Dtype.int8),
            },
        )
    quantizer = ModelQuantizer(config)
    return quantizer.quantize_model(network, calibration), quantizer.freeze


def quantized_by_amd(network: nn.Module, method: str, calibration: list[Tensor]) -> tuple[nn.Module, Any]:
    """On its graph, as its examples train; blocks, which that does not take, module by module."""
    from quark.common.utils.import_utils import export_for_training
    from quark.torch import ModelQuantizer
    from quark.torch.quantization.config.config import OCP_MXFP4Spec, QConfig, QLayerConfig, QTensorConfig
    from quark.torch.quantization.config.type import Dtype, QSchemeType, QuantizationMode, RoundType, ScaleType
    from quark.torch.quantization.observer.lsq_observer import LSQObserver

    if method == "mxfp4":
        blocks = {
            name: OCP_MXFP4Spec(ch_axis=1, is_dynamic=name == "input_tensors").to_quantization_spec()
            for name in ("input_tensors", "weight")
        }
        config = QConfig(global_quant_config=QLayerConfig(**blocks))
        return ModelQuantizer(config).quantize_model(network, calibration), lambda model: model

    def learned(dtype: Dtype) -> QTensorConfig:
        return QTensorConfig(
            dtype=dtype,
            qscheme=QSchemeType.per_tensor,
            observer_cls=LSQObserver,
            symmetric=True,
            scale_type=ScaleType.float,
            round_method=RoundType.half_even,
            is_dynamic=False,
        )

    def products(inputs: Dtype, weights: Dtype) -> QLayerConfig:
        return QLayerConfig(input_tensors=learned(inputs), weight=learned(weights))

    kinds = (Dtype.uint4, Dtype.int4) if method == "lsq4" else (Dtype.uint8, Dtype.int8)
    config = QConfig(
        global_quant_config=products(*kinds),
        layer_quant_config={
            "conv1": products(Dtype.int8, Dtype.int8),
            "linear": products(Dtype.uint8, Dtype.int8),
        },
        quant_mode=QuantizationMode.fx_graph_mode,
    )
    quantizer = ModelQuantizer(config)
    graph = export_for_training(network, (calibration[0],)).module()
    return quantizer.quantize_model(graph, calibration), lambda model: quantizer.freeze(model.eval())


def quantized_by_brevitas(network: nn.Module, method: str, calibration: list[Tensor]) -> tuple[nn.Module, Any]:
    """Its layers with learned scales of activations, in the place of torch's; weights by their largest values."""
    from brevitas import nn as qnn
    from brevitas.graph.calibrate import calibration_mode
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat

    def with_quantizers(name: str, module: nn.Module) -> nn.Module:
        is_end = name in ("conv1", "linear")
        bits = 8 if is_end or method == "lsq8" else 4
        settings: dict[str, Any] = {
            "weight_quant": Int8WeightPerTensorFloat,
            "weight_bit_width": bits,
            "input_quant": Int8ActPerTensorFloat if name == "conv1" else Uint8ActPerTensorFloat,
            "input_bit_width": bits,
            "bias": module.bias is not None,
        }
        if isinstance(module, nn.Linear):
            made = qnn.QuantLinear(module.in_features, module.out_features, **settings)
        else:
            assert isinstance(module, nn.Conv2d)
            sizes = (module.kernel_size, module.stride, module.padding)
            made = qnn.QuantConv2d(module.in_channels, module.out_channels, *sizes, **settings)
        made.load_state_dict(module.state_dict(), strict=False)
        return made.to(calibration[0].device)

    for name, module in list(network.named_modules()):
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            network.set_submodule(name, with_quantizers(name, module))
    network.eval()
    with torch.no_grad(), calibration_mode(network):
        for batch in calibration:
            network(batch)
    return network, lambda model: model


TOOLS = {"ours": quantized_by_ours, "amd-quark-torch": quantized_by_amd, "brevitas": quantized_by_brevitas}


def make_step(network: nn.Module, job: Job, teacher: nn.Module | None) -> Callable[[Tensor, Tensor, float], None]:
    """A step of training at a share of the learning rate."""
    optimizer = torch.optim.SGD(network.parameters(), job["learning_rate"], 0.9, weight_decay=1e-4, nesterov=True)
    share = job["distillation"] if teacher is not None else 0.0

    def step(x: Tensor, y: Tensor, factor: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = job["learning_rate"] * factor
        scores = network(x)
        loss = (1 - share) * functional.cross_entropy(scores, y)
        if teacher is not None:
            with torch.no_grad():
                wanted = functional.log_softmax(teacher(x), 1)
            found = functional.log_softmax(scores, 1)
            loss = loss + share * functional.kl_div(found, wanted, reduction="batchmean", log_target=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def timed(job: Job, networks: dict[str, nn.Module], images: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """Seconds of a step without teacher, of every turn."""
    x, y = normalized(images[: job["batch"]]), labels[: job["batch"]]
    steps = {
        name: make_step(network.train(), {**job, "learning_rate": 1e-6}, None) for name, network in networks.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(job["turns"] + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(job["steps"]):
                step(x, y, 1.0)
            if job["device"] != "cpu":
                torch.cuda.synchronize()
            if turn:  # the first one makes ready
                seconds[name].append((time.perf_counter() - start) / job["steps"])
    return seconds


def main() -> None:
    job: Job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    with np.load(job["data"]) as archive:
        whole = {name: torch.from_numpy(archive[name]).to(job["device"]) for name in archive.files}
    images, labels = whole["train_x"][: job["images"]], whole["train_y"][: job["images"]].long()
    calibration = [normalized(part) for part in images[: job["calibration"]].split(BATCH)]
    quantize = TOOLS[job["who"]]
    result: dict[str, Any] = {}
    if job["turns"]:
        made, _ = quantize(float_network(job), job["method"], calibration[:1])
        result["seconds"] = timed(job, {"float": float_network(job), "quantized": made}, images, labels)
    if job["epochs"]:
        test, right = whole["test_x"], whole["test_y"].long()
        teacher = float_network(job)
        model, freeze = quantize(float_network(job), job["method"], calibration)
        result["float_top1"] = top1(teacher, test, right)
        result["ptq_top1"] = top1(model, test, right)
        step = make_step(model, job, teacher)
        count, number = job["epochs"] * (len(images) // job["batch"]), 0
        for epoch in range(job["epochs"]):
            model.train()
            for x, y in batches(images, labels, job["batch"], job["seed"] + epoch):
                step(x, y, 0.5 * (1 + math.cos(math.pi * (number + 0.5) / count)))
                number += 1
        result["qat_top1"] = top1(freeze(model), test, right)
    Path(job["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
