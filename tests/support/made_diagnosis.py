"""Diagnoses made by hand: of the size of real ones, with names that try to break a page."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from quark.account import FileFacts
from quark.compare import OutputFidelity
from quark.diagnosis import (
    AccuracyFacts,
    Action,
    Basis,
    Diagnosis,
    Histogram,
    LayerDiagnosis,
    Remark,
    Remedy,
    SpeedFacts,
    Step,
    WeightFacts,
)
from quark.plan import SkippedNode

ODD_NAMES = {
    3: "<script>window.broken = 1</script>",
    7: '"><img src=x onerror="window.broken = 2">',
    11: "</script><svg onload='window.broken = 3'>",
    15: "слой/свёртка_λ→ω 層 🙂\u2028\u2029",
    19: "/deep" * 60 + "/Conv",
    23: "${window.broken = 4}`; window.broken = 5 //&amp;&lt;",
    27: "__proto__",
    31: "lone \ud800 surrogate",
}
HISTOGRAMS = 12


def made_diagnosis(count: int = 54, seed: int = 0, **changes) -> Diagnosis:
    """A network that degraded; `changes` replace fields."""
    dice = random.Random(seed)
    made = _ranked([_layer(index, count, dice) for index in range(count)])
    diagnosis = Diagnosis(
        source=FileFacts("resnet50_v1.onnx", 102_146_283, "ab" * 32),
        result=FileFacts("resnet50_<xint8>.onnx", 25_912_004, "0123456789abcdef" * 4),
        basis=Basis("folder calib", 64, False, 8, "kl"),
        outputs=(OutputFidelity("logits", 0.9312, 8.47, 0.828, 3.214),),
        layers=tuple(made),
        skipped=_skipped(),
        weights=WeightFacts(25_557_032, 32.0, 8.01, 8.11),
        accuracy=AccuracyFacts("folder val", 1000, 0.761, 0.718, 0.929, 0.9, 0.0081),
        speed=SpeedFacts(41.2, 17.9, 1, 2),
        lint=_lint(),
        steps=(
            Step("leave the 3 most sensitive layers in float", "--set nodes_to_exclude=..."),
            Step("give each channel its own scale: per_channel=true"),
            Step("let AdaRound choose the rounding: XINT8_ADAROUND"),
        ),
        remarks=("17 tensors of the quantized network are rescaled by channel; they are compared at the float scale",),
        making=_making(),
    )
    return replace(diagnosis, **changes)


def bare_diagnosis() -> Diagnosis:
    """The least that there can be: one layer without figures, nothing else."""
    layer = LayerDiagnosis("only", "Conv", "y", 0)
    return Diagnosis(FileFacts("f.onnx", 10, "0"), FileFacts("q.onnx", 10, "1"), Basis("none", 0), (), (layer,))


def _layer(index: int, count: int, dice: random.Random) -> LayerDiagnosis:
    is_conv, is_bad = index % 3 != 2, index in (4, 16, 30, 41)
    name = ODD_NAMES.get(index, f"/layer{index // 9 + 1}/layer{index // 9 + 1}.{index % 9}/conv{index % 3 + 1}/Conv")
    local = dice.uniform(9, 15) if is_bad else dice.uniform(22, 44)
    accumulated = max(local * 0.9 - 22 * index / count, 4.5) if index else local
    figures = {
        "local": OutputFidelity(name, 1 - 10 ** (-local / 10) / 2, math.inf if index == 2 else local, None, 0.3),
        "accumulated": OutputFidelity(name, 1 - 10 ** (-accumulated / 10) / 2, accumulated, None, 1.7),
    }
    has_pictures = is_bad or index < HISTOGRAMS - 4
    return LayerDiagnosis(
        name=name,
        op_type="Conv" if is_conv else dice.choice(["Add", "Gemm", "GlobalAveragePool"]),
        tensor=f"{name}_output_0",
        order=index,
        weights=_weights(index, dice) if is_conv else "",
        inputs="uint8" if index % 5 else "int16",
        parameters=dice.randrange(9_000, 2_400_000) if is_conv else 0,
        bits=(8.0 if index % 7 else 4.25) if is_conv else None,
        sensitivity=(dice.uniform(0.03, 0.09) if is_bad else dice.uniform(0, 0.004)) if is_conv else None,
        clipped=dice.choice([0.0, 0.0, 0.0004, 0.0021, 0.023]),
        causes=_CAUSES if is_bad else (),
        remedies=_remedies(name) if is_bad else (),
        weight_histogram=_histogram(f"{name}.weight", dice, 0.6) if has_pictures and is_conv else None,
        input_histogram=_histogram(f"{name}_input", dice, 6.0) if has_pictures else None,
        **figures,
    )


def _weights(index: int, dice: random.Random) -> str:
    return "mxfp6_e2m3 in blocks of 128, packed" if index == 6 else dice.choice(["int8", "int8 per channel"])


_CAUSES = ("channels of the weight differ 900-fold under one scale", "2.3 % of the inputs are clipped")


def _remedies(name: str) -> tuple[Remedy, ...]:
    return (
        Remedy(
            Action.EXCLUDE,
            "leave it in float (17 % of the output error, 288 parameters)",
            f"nodes_to_exclude=[{name!r}]",
        ),
        Remedy(Action.PER_CHANNEL, "a scale for each channel: they differ 900-fold", "per_channel=true"),
        Remedy(Action.ADAROUND, "choose the rounding of its weights by what comes out", "include_fast_ft=true"),
        Remedy(Action.MORE_BITS, "16 bits for what it reads"),
    )


def _ranked(layers: list[LayerDiagnosis]) -> list[LayerDiagnosis]:
    total = sum(layer.sensitivity or 0.0 for layer in layers) or 1.0
    measured = [i for i, layer in enumerate(layers) if layer.sensitivity is not None]
    order = sorted(measured, key=lambda i: -(layers[i].sensitivity or 0.0))
    for rank, index in enumerate(order, 1):
        layers[index] = replace(layers[index], rank=rank, share=(layers[index].sensitivity or 0.0) / total)
    return layers


def _histogram(tensor: str, dice: random.Random, width: float) -> Histogram:
    values = [dice.gauss(0, width / 3) for _ in range(4000)]
    lowest, highest, bins = -width, width * 1.4, 64
    limit = 0.8 * width
    became = [max(-limit, min(limit, round(value / limit * 20) / 20 * limit)) for value in values]

    def counted(numbers: list[float]) -> tuple[int, ...]:
        counts = [0] * bins
        for value in numbers:
            counts[max(0, min(bins - 1, int((value - lowest) / (highest - lowest) * bins)))] += 1
        return tuple(counts)

    return Histogram(tensor, lowest, highest, counted(values), counted(became), (-limit, limit))


def _skipped() -> tuple[SkippedNode, ...]:
    chosen = [SkippedNode(f"softmax{i}", "Softmax", "no integer kernel for Softmax") for i in range(3)]
    shapes = [SkippedNode(f"/shape<{i}>", "Shape", "its output is no float tensor") for i in range(14)]
    return (*chosen, *shapes, SkippedNode("<b>fc</b>", "Gemm", "excluded by nodes_to_exclude"))


def _lint() -> tuple[Remark, ...]:
    many = [
        Remark("error", "PerTensor", f"conv{i} w{i}", "one scale for each channel", "per_channel=false")
        for i in range(9)
    ]
    return (*many, Remark("warning", "Batch", "input <x>", "the batch size is free", "--set FixShapes=..."))


def _making() -> dict[str, object]:
    return {
        "command": "quark reproduce 'resnet50_<xint8>.json'",
        "report_command": "quark report 'resnet50_<xint8>.onnx' --float resnet50_v1.onnx --calib calib",
        "config_name": "XINT8",
        "config_changes": [{"option": "extra_options.CLESteps", "preset": 1, "here": 2}],
        "config": {"per_channel": False, "extra_options": {"CLESteps": 2, "Odd": "</script><b>"}},
        "versions": {"quark": "0.1.0", "numpy": "2.4.6", "onnx": "1.23.2", "onnxruntime": "1.31.1"},
        "calibration": {"source": "folder calib", "samples": 240, "held_out": 16, "methods": ["PowerOfTwoMinMSE"]},
        "seeds": {"random_seed": 0},
        "hashes": {"plan": "ad" * 32, "config": "85" * 32},
        "algorithms": ["cross-layer equalization: 31 changes", "bias correction: 53 changes"],
        "notes": [],
    }
