"""Train a quantized network to give the outputs of the float network, on samples without labels.

    loss = sum over outputs of D(float, quantized)  +  w * mean over residual sums of |f - q|^2 / |f|^2

D is the divergence sum p log(p / q) for class scores (a row for each sample), and the relative squared error for other
outputs. Adam with warm-up, a cosine to 0 and clipped gradients moves every weight by about the learning rate, a share
of what rounding changes weights by. Samples are varied (augmentation.py), so that few of them go further.

About twenty times in a run, the network with the weights as they are and the one with their running average are
compared with float on samples that training does not see. These divergences also differ by chance, so among those that
are as good as the best the latest is kept: it was trained longer. The weights as they were before training are compared
first, and stay if nothing is better. The state is written at these looks, and the same run goes on from there. On the
CPU, the same run ends with the same bits, whether it was interrupted or not. On a GPU it does not: the sums that make
gradients are in no fixed order there.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quark.errors import ModelError
from quark.features.distillation.augmentation import Augmentation, coloured, cut_and_mirrored, mixed, takes_images
from quark.features.distillation.descent import Descent
from quark.features.distillation.feed import Feed, can_stack
from quark.features.distillation.options import DistillationOptions
from quark.features.finetuning.network import OnnxNetwork, Sample, Tensors, tensor_float32
from quark.files.output import complete
from quark.plan import Choice
from quark.text import get_logger

_LOG = get_logger(__name__)

LOOKS = 20
PATIENCE = 10  # looks without a gain, after which training stops if divergence grows
GROWN = 1.25  # times the least divergence: samples are learned by heart
CHANCE = 1.03  # times the least divergence is as good
WARM_UP = 0.1  # share of the steps
AVERAGED = 0.1  # share of the steps that the running average covers
KEPT_EVERY = 30.0  # seconds between states that are written
HALF_ON = ("cuda",)  # devices where networks of coarse formats train in bfloat16, which takes half of the time there
# bits of elements in blocks: bfloat16 holds their numbers exactly, and rounds sums far less than they do
COARSE_BITS = 4
TOGETHER = 32  # samples that are looked at together


@dataclass(frozen=True)
class Distilled:
    """The best weights by constant, None if those that stood were best, and the divergence before and after."""

    weights: Mapping[str, Any] | None
    before: float
    after: float
    steps: int


class OutputKind(Enum):
    """The kind of an output, which decides how it is compared."""

    SCORES = "scores"
    PROBABILITIES = "probabilities"
    OTHER = "other"


class Distillation:
    """`student` has quantizers, `teacher` is the float network. `training` and `held_out` are samples by input name.
    `starts` are constants to train from where those of the student are not: what it has is what training has to beat.
    """

    def __init__(
        self,
        student: OnnxNetwork,
        teacher: OnnxNetwork,
        training: Sequence[Sample],
        held_out: Sequence[Sample],
        options: DistillationOptions,
        state: Path | None = None,
        starts: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    ) -> None:
        self._options, self._device, self._state = options, torch.device(options.device), state
        self.student, self.teacher = student.to(self._device), teacher.to(self._device)
        for parameter in (*teacher.parameters(), *student.parameters()):
            parameter.requires_grad_(False)
        self._chance = torch.Generator(self._device).manual_seed(options.seed)
        student.unrounded, student.chance = options.unrounded_share, self._chance
        self._rates = rates_of(student, teacher, options.rate_share)
        constants = student.trained_constants()
        self._parameters = {name: constants[name].requires_grad_() for name in self._rates}
        self._starts = {name: torch.from_numpy(start) for name, start in starts.items() if name in self._parameters}
        self._features = common_sums(student, teacher) if options.feature_weight else []
        stacks = can_stack(self.teacher, [*training, *held_out], self._device)
        self._training, self._held_out = (
            Feed(samples, self._device, can_stack=stacks) for samples in (training, held_out)
        )
        first, _ = next(self._training.batches([0], 1))
        self._are_images = takes_images(first, Augmentation(options.augmentation))
        with torch.no_grad():
            expected = self.teacher.tensors(first, self.teacher.output_names)
        self._is_half = self._device.type in HALF_ON and student.has_coarse_blocks(COARSE_BITS)
        self._kinds = {
            name: kind_of(expected[name]) for name in student.output_names if expected[name].is_floating_point()
        }
        if not self._kinds:
            raise ModelError("the network has no output of floating-point numbers to compare")
        self._best: Tensors | None = None
        self._before = self._least = self._kept_divergence = math.inf
        self._written = time.monotonic()

    def run(self, advance: Callable[[], None] = lambda: None) -> Distilled:
        """Train; `advance` is called after each step."""
        with tensor_float32(is_on=True):
            return self._run(advance)

    def _run(self, advance: Callable[[], None]) -> Distilled:
        options = self._options
        before = self._before = self._kept_divergence = self.divergence()
        if not self._parameters or not math.isfinite(before):
            return Distilled(None, before, before, 0)
        self._put(self._starts)
        # the least divergence so far in training, which stops when it no longer falls
        self._least = self.divergence() if self._starts else before
        loss = functools.partial(self._loss, has_features=True)
        descent = Descent(self._parameters, self._rates, loss, self._chance)
        period, (idle, step) = max(1, options.steps // LOOKS), self._restored(descent)
        begin, first = time.monotonic(), step
        for _ in range(step):
            advance()
        has_grown = False
        while step < options.steps and (idle < PATIENCE or not has_grown):
            self._step(descent, step)
            step += 1
            advance()
            if step % period and step != options.steps:
                continue
            least = self._least
            now, average = self._look(descent)
            idle = 0 if self._least < least else idle + 1
            has_grown = min(now, average) > GROWN * self._least
            self._keep(descent, idle, step)
            to_go = (time.monotonic() - begin) / (step - first) * (options.steps - step)
            text = "distillation %d of %d: loss %.4g; held-out divergence %.4g, of the average %.4g, before %.4g; %s"
            left = f"about {to_go:.0f} s to go"
            _LOG.info(text, step, options.steps, descent.read_loss(), now, average, before, left)
        weights = None if self._best is None else {name: tensor.cpu().numpy() for name, tensor in self._best.items()}
        return Distilled(weights, before, self._kept_divergence, step)

    @torch.no_grad()
    def divergence(self) -> float:
        """The mean divergence of the student on the held-out samples."""
        total = torch.zeros((), device=self._device)
        for batch, count in self._held_out.batches(range(len(self._held_out)), TOGETHER):
            total += self._loss(batch, has_features=False) * count
        return float(total) / max(1, len(self._held_out))

    def _step(self, descent: Descent, step: int) -> None:
        options = self._options
        chance = np.random.default_rng([options.seed % (1 << 32), step])  # so that a run can resume at any step
        if self._device.type == "cpu":
            self._chance.manual_seed(options.seed + step)
        count = min(options.batch_size, len(self._training))
        numbers = chance.choice(len(self._training), count, replace=False).tolist()
        is_mixed = chance.random() < options.mixed_share
        batches = []
        for batch, size in self._training.batches(numbers, count):
            varied = coloured(cut_and_mirrored(batch, chance), chance) if self._are_images else batch
            varied = mixed(varied, chance, are_images=self._are_images) if is_mixed else varied
            batches.append((varied, size / count))
        done = step / options.steps
        pace = min(1.0, (done + 1 / options.steps) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))
        descent.step(batches, step + 1, pace, 1 / max(1.0, min(step + 1.0, AVERAGED * options.steps)))

    def _loss(self, batch: Tensors, *, has_features: bool) -> torch.Tensor:
        batch = {name: channels_last(x) for name, x in batch.items()}
        wanted = [*self._kinds, *(self._features if has_features else ())]
        is_half = self._is_half and torch.is_grad_enabled()
        # without a cache, since a captured graph would read the cast weights of the step that was captured
        with torch.autocast(self._device.type, torch.bfloat16, enabled=is_half, cache_enabled=False):
            with torch.no_grad():
                expected = self.teacher.tensors(batch, wanted)
            outputs = self.student.tensors(batch, wanted)
        losses = [output_loss(expected[name], outputs[name], kind) for name, kind in self._kinds.items()]
        loss = torch.stack(losses).sum()
        if has_features and self._features:
            errors = [relative_error(expected[name], outputs[name]) for name in self._features]
            loss = loss + self._options.feature_weight * torch.stack(errors).mean()
        return loss

    def _look(self, descent: Descent) -> tuple[float, float]:
        """The divergence of the weights as they are and of their average; the better one is kept if it is the best."""
        now = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        divergence = self.divergence()
        self._put(descent.average)
        of_average = self.divergence()
        self._put(now)
        least = min(divergence, of_average)
        if least < self._before and least <= CHANCE * self._least:
            kept = now if divergence <= of_average else descent.average
            self._best = {name: tensor.clone() for name, tensor in kept.items()}
            self._kept_divergence = least
        self._least = min(self._least, least)
        return divergence, of_average

    @torch.no_grad()
    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            self._parameters[name].copy_(weight)

    def _keep(self, descent: Descent, idle: int, step: int) -> None:
        if self._state is None or time.monotonic() - self._written < KEPT_EVERY:
            return
        content = {
            "numbers": (self._least, self._kept_divergence, idle, step),
            "parameters": {name: parameter.detach() for name, parameter in self._parameters.items()},
            "best": self._best,
            "descent": descent.state(),
        }
        with complete(self._state) as unfinished:
            torch.save(content, unfinished)
        self._written = time.monotonic()

    def _restored(self, descent: Descent) -> tuple[int, int]:
        """Go on from the state of an earlier run, if there is one. Returns the looks without a gain, and the steps."""
        if self._state is None or not self._state.exists():
            return 0, 0
        start = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        try:
            content = torch.load(self._state, map_location=self._device, weights_only=True)
            least, kept, idle, step = content["numbers"]
            best, numbers = content["best"], (float(least), float(kept), int(idle), int(step))
            descent.restore(content["descent"])
            self._put(content["parameters"])
        except Exception as error:  # noqa: BLE001 - whatever torch and pickle say of a damaged file
            _LOG.warning("the state of distillation in '%s' is ignored: %s", self._state, error)
            self._put(start)
            descent.reset()
            return 0, 0
        self._best, (self._least, self._kept_divergence, *counts) = best, numbers
        return counts[0], counts[1]


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """Images in the order that a GPU's convolutions compute in, which has the values of a block side by side."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 and x.device.type == "cuda" else x


def rates_of(student: OnnxNetwork, teacher: OnnxNetwork, share: float) -> dict[str, float]:
    """The learning rate of each trained constant, the same for all: a share of the RMS change that rounding makes to a
    weight, that of the median layer. Constants of nodes without a quantized weight are not trained.

    It is the float network's weights that are rounded to find it. Those of the student may have been rounded already,
    and rounding them again changes nothing.
    """
    rounded: dict[str, float] = {}
    names: dict[str, list[str]] = {}
    constants, originals = student.trained_constants(), teacher.trained_constants()
    weights = {node: originals.get(name) for node, index, name, _ in teacher.constant_readers() if index == 1}
    for node, index, name, choices in student.constant_readers():
        names.setdefault(node, []).append(name)
        if index == 1 and choices and name in constants:
            original = weights.get(node)
            x = (constants[name] if original is None else original).detach()
            change = float((round_all(student, choices, x) - x).square().mean().sqrt())
            if change > 0:
                rounded[node] = change
    rate = share * float(np.median(list(rounded.values()))) if rounded else 0.0
    return {name: rate for node in rounded for name in names[node] if name in constants}


def round_all(student: OnnxNetwork, choices: Sequence[Choice], x: torch.Tensor) -> torch.Tensor:
    """Round by one choice after the other."""
    for choice in choices:
        x = student.quantizer(choice, x).values(x)
    return x


def common_sums(student: OnnxNetwork, teacher: OnnxNetwork) -> list[str]:
    """The residual sums that both networks have, by name."""
    return [name for name in teacher.sums() if name in set(student.sums())]


def kind_of(expected: torch.Tensor) -> OutputKind:
    """The kind of a float output."""
    if expected.dim() != 2 or expected.shape[1] < 2:
        return OutputKind.OTHER
    is_even = bool(((expected.sum(dim=1) - 1).abs() < 1e-3).all())
    return OutputKind.PROBABILITIES if is_even and bool((expected >= 0).all()) else OutputKind.SCORES


def output_loss(expected: torch.Tensor, actual: torch.Tensor, kind: OutputKind) -> torch.Tensor:
    """D of one output."""
    expected, actual = expected.float(), actual.float()
    if kind is OutputKind.OTHER:
        return relative_error(expected, actual)
    if kind is OutputKind.PROBABILITIES:
        p, q = expected.clamp(min=1e-12), actual.clamp(min=1e-12)
        return (p * (p.log() - q.log())).sum(dim=1).mean()
    log_p, log_q = (torch.log_softmax(logits, 1) for logits in (expected, actual))
    return (log_p.exp() * (log_p - log_q)).sum(dim=1).mean()


def relative_error(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """|e - f|^2 / |e|^2"""
    return (expected - actual).float().square().sum() / expected.float().square().sum().clamp(min=1e-20)
