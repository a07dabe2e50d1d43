"""Train a quantized network to give the outputs of the float network, on samples without labels.

    loss = sum over outputs of D(float, quantized)  +  w * mean over residual sums of |f - q|^2 / |f|^2

D is the divergence sum p log(p / q) for class scores (a row for each sample), and the relative squared error for other
outputs. Adam with warm-up, a cosine to 0 and clipped gradients moves every weight by about its learning rate, which is
a share of what rounding changes the weights of that layer by. In a part of the batches each sample is mixed with
another: the float network says what is right for any input, so that few samples go further.

Now and then, the network with the weights as they are and the one with their running average are compared with float on
samples that training does not see, and the best of all is kept. The first look is at the weights as they stood: if
nothing is better, nothing changes. The state is written at every look, and the same run goes on from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quark.features.distillation.network import OnnxNetwork
from quark.features.distillation.options import DistillationOptions
from quark.features.finetuning.quantizers import tensor_of
from quark.files.output import complete
from quark.plan import Choice
from quark.text import get_logger

_LOG = get_logger(__name__)

LOOKS = 20
PATIENCE = 6  # looks without a gain, after which training stops
WARM_UP = 0.1  # of the steps
AVERAGED = 0.1  # of the steps, that the running average goes back
LARGEST_GRADIENT = 1.0  # of all parameters together
TOGETHER = 32  # samples that are looked at together
_ALMOST = 1e-2  # relative: a batch that differs so little from its samples one by one only rounds differently

Sample = Mapping[str, Any]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Distilled:
    """The best weights by constant, None if those that stood were best, and the divergence before and after."""

    weights: Mapping[str, Any] | None
    before: float
    after: float
    steps: int


class Distillation:
    """`student` has quantizers, `teacher` is the float network. `training` and `held_out` are samples by input name."""

    def __init__(
        self,
        student: OnnxNetwork,
        teacher: OnnxNetwork,
        training: Sequence[Sample],
        held_out: Sequence[Sample],
        options: DistillationOptions,
        state: Path | None = None,
    ) -> None:
        self._options, self._device, self._state = options, torch.device(options.device), state
        self.student, self.teacher = student.to(self._device), teacher.to(self._device)
        self._training, self._held_out = training, held_out
        for parameter in (*teacher.parameters(), *student.parameters()):
            parameter.requires_grad_(False)
        self._rates = rates_of(student, options.rate_share)
        constants = student.trained_constants()
        self._parameters = {name: constants[name].requires_grad_() for name in self._rates}
        self._features = common_sums(student, teacher) if options.feature_weight else []
        self._average = {name: each.detach().clone() for name, each in self._parameters.items()}
        self._best: Tensors | None = None
        self._can_stack = self._find_stacking()

    def run(self, advance: Callable[[], None] = lambda: None) -> Distilled:
        """Train; `advance` is called after each step."""
        options = self._options
        before = least = self.divergence()
        if not self._parameters or not math.isfinite(before):
            return Distilled(None, before, before, 0)
        groups = [{"params": [each], "lr": self._rates[name]} for name, each in self._parameters.items()]
        optimizer = torch.optim.Adam(groups)
        period, idle, step = max(1, options.steps // LOOKS), 0, 0
        if (kept := self._restored(optimizer)) is not None:
            least, idle, step = kept
        begin, first = time.monotonic(), step
        for _ in range(step):
            advance()
        while step < options.steps and idle < PATIENCE:
            self._step(optimizer, step)
            step += 1
            advance()
            if step % period and step != options.steps:
                continue
            found = self._look(least)
            idle, least = (0, found) if found < least else (idle + 1, least)
            self._keep(optimizer, least, idle, step)
            to_go = (time.monotonic() - begin) / (step - first) * (options.steps - step)
            text = "distillation %d of %d: held-out divergence %.4g, was %.4g; about %.0f s to go"
            _LOG.info(text, step, options.steps, least, before, to_go)
        weights = None if self._best is None else {name: each.cpu().numpy() for name, each in self._best.items()}
        return Distilled(weights, before, least, step)

    @torch.no_grad()
    def divergence(self) -> float:
        """The mean divergence of the student on the held-out samples."""
        total = 0.0
        for batch, count in self._batches(self._held_out, TOGETHER):
            total += float(self._loss(batch, has_features=False)) * count
        return total / max(1, len(self._held_out))

    def _step(self, optimizer: torch.optim.Adam, step: int) -> None:
        options = self._options
        chance = np.random.default_rng([options.seed % (1 << 32), step])  # so that a run can go on at any step
        numbers = chance.choice(len(self._training), min(options.batch_size, len(self._training)), replace=False)
        is_mixed = chance.random() < options.mixed_share
        share = float(chance.uniform(0.5, 1.0))
        optimizer.zero_grad()
        for batch, count in self._batches([self._training[i] for i in numbers], options.batch_size):
            mixed = {name: _mixed(x, share) for name, x in batch.items()} if is_mixed else batch
            loss = self._loss(mixed, has_features=True) * (count / len(numbers))
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self._parameters.values()), LARGEST_GRADIENT)
        done = step / options.steps
        fading = min(1.0, (done + 1 / options.steps) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))
        for group, rate in zip(optimizer.param_groups, self._rates.values(), strict=True):
            group["lr"] = rate * fading
        optimizer.step()
        keep = 1 - 1 / max(1.0, min(step + 1.0, AVERAGED * options.steps))
        with torch.no_grad():
            for name, each in self._parameters.items():
                self._average[name].lerp_(each, 1 - keep)

    def _loss(self, batch: Tensors, *, has_features: bool) -> torch.Tensor:
        wanted = [*self.student.output_names, *(self._features if has_features else ())]
        with torch.no_grad():
            expected = self.teacher.tensors(batch, wanted)
        found = self.student.tensors(batch, wanted)
        outputs = [each for each in self.student.output_names if expected[each].is_floating_point()]
        loss = torch.stack([output_loss(expected[name], found[name]) for name in outputs]).sum()
        if has_features and self._features:
            errors = [relative_error(expected[name], found[name]) for name in self._features]
            loss = loss + self._options.feature_weight * torch.stack(errors).mean()
        return loss

    def _look(self, least: float) -> float:
        """Keep the weights or their average, whichever is better, if that is better than the best so far."""
        now = {name: each.detach().clone() for name, each in self._parameters.items()}
        found = [(self.divergence(), now)]
        self._put(self._average)
        found.append((self.divergence(), {name: each.clone() for name, each in self._average.items()}))
        self._put(now)
        error, weights = min(found, key=lambda each: each[0])
        if error < least:
            self._best = weights
        return error

    @torch.no_grad()
    def _put(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, each in weights.items():
            self._parameters[name].copy_(each)

    def _batches(self, samples: Sequence[Sample], size: int) -> Iterator[tuple[Tensors, int]]:
        step = size if self._can_stack else 1
        for start in range(0, len(samples), step):
            some = samples[start : start + step]
            yield {name: self._stacked([each[name] for each in some]) for name in some[0]}, len(some)

    def _stacked(self, arrays: Sequence[Any]) -> torch.Tensor:
        whole = np.concatenate(arrays) if len(arrays) > 1 else np.asarray(arrays[0])
        if whole.dtype.kind != "f":
            return torch.from_numpy(np.array(whole)).to(self._device)
        return tensor_of(whole, self._device)

    @torch.no_grad()
    def _find_stacking(self) -> bool:
        """True if the float network computes two samples together as it does one by one."""
        some = [*self._training[:2]]
        shapes = [{name: np.shape(each) for name, each in sample.items()} for sample in some]
        if len(some) < 2 or shapes[0] != shapes[1] or any(not shape for shape in shapes[0].values()):
            return False
        try:
            both = self.teacher(**{name: self._stacked([each[name] for each in some]) for name in some[0]})
        except Exception as error:  # noqa: BLE001 - whatever torch says of a shape that is written into the network
            _LOG.info("samples are computed one by one: %s", error)
            return False
        alone = [self.teacher(**{name: self._stacked([each[name]]) for name in each}) for each in some]
        pairs = zip(both, zip(*alone, strict=True), strict=True) if isinstance(both, tuple) else [(both, alone)]
        for together, parts in pairs:
            joined = torch.cat(list(parts))
            if joined.shape != together.shape:
                return False
            difference = (joined.float() - together.float()).norm()
            if float(difference) > _ALMOST * float(joined.float().norm()):
                return False
        return True

    def _keep(self, optimizer: torch.optim.Adam, least: float, idle: int, step: int) -> None:
        if self._state is None:
            return
        content = {
            "numbers": (least, idle, step),
            "parameters": {name: each.detach() for name, each in self._parameters.items()},
            "average": self._average,
            "best": self._best,
            "optimizer": optimizer.state_dict(),
        }
        with complete(self._state) as unfinished:
            torch.save(content, unfinished)

    def _restored(self, optimizer: torch.optim.Adam) -> tuple[float, int, int] | None:
        """The state of an earlier run; None if there is none."""
        if self._state is None or not self._state.exists():
            return None
        try:
            content = torch.load(self._state, map_location=self._device, weights_only=True)
            self._put(content["parameters"])
            optimizer.load_state_dict(content["optimizer"])
            self._average, self._best = content["average"], content["best"]
            least, idle, step = content["numbers"]
        except (OSError, RuntimeError, KeyError, ValueError, EOFError) as error:
            _LOG.warning("the state of distillation in '%s' is ignored: %s", self._state, error)
            return None
        return float(least), int(idle), int(step)


def rates_of(student: OnnxNetwork, share: float) -> dict[str, float]:
    """The learning rate of each trained constant: a share of the RMS change that rounding makes to the weight of the
    same node. Constants of nodes without a quantized weight are not trained."""
    rounded: dict[str, float] = {}
    names: dict[str, list[str]] = {}
    constants = student.trained_constants()
    for node, index, name, choices in student.constant_readers():
        names.setdefault(node, []).append(name)
        if index == 1 and choices and name in constants:
            x = constants[name].detach()
            change = float((round_all(student, choices, x) - x).square().mean().sqrt())
            if change > 0:
                rounded[node] = share * change
    return {name: rate for node, rate in rounded.items() for name in names[node] if name in constants}


def round_all(student: OnnxNetwork, choices: Sequence[Choice], x: torch.Tensor) -> torch.Tensor:
    """Round by one choice after the other."""
    for choice in choices:
        x = student.quantizer(choice, x).values(x)
    return x


def common_sums(student: OnnxNetwork, teacher: OnnxNetwork) -> list[str]:
    """The residual sums that both networks have, by name."""
    return [name for name in teacher.sums() if name in set(student.sums())]


def output_loss(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """D of one output."""
    if expected.dim() != 2 or expected.shape[1] < 2:
        return relative_error(expected, found)
    rows = expected.sum(dim=1)
    if bool((expected >= 0).all()) and bool(((rows - 1).abs() < 1e-3).all()):
        p, q = expected.clamp(min=1e-12), found.clamp(min=1e-12)
        return (p * (p.log() - q.log())).sum(dim=1).mean()
    log_p, log_q = torch.log_softmax(expected, 1), torch.log_softmax(found, 1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1).mean()


def relative_error(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """|e - f|^2 / |e|^2"""
    return (expected - found).square().sum() / expected.square().sum().clamp(min=1e-20)


def _mixed(x: torch.Tensor, share: float) -> torch.Tensor:
    """Each sample with a part of the one at the other end of the batch; integers stay as they are."""
    return x * share + x.flip(0) * (1 - share) if x.is_floating_point() else x
