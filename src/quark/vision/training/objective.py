"""What is made small: the cross entropy with the labels, and the distance from the float network's scores.

    (1 - d) CE(scores, labels) + d T^2 KL(softmax(teacher / T) || softmax(scores / T))

T^2 keeps the gradient of the second part from shrinking as T grows (arXiv 1503.02531).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from quark.vision.training.options import TrainingOptions


@dataclass(frozen=True)
class Objective:
    """`teacher` is in evaluation mode, and on the device of the images."""

    label_smoothing: float = 0.0
    distillation: float = 0.0
    temperature: float = 1.0
    teacher: nn.Module | None = None

    @classmethod
    def of(cls, options: TrainingOptions, teacher: nn.Module | None) -> Objective:
        return cls(options.label_smoothing, options.distillation, options.temperature, teacher)

    def loss(self, scores: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        scores = scores.float()
        share = self.distillation if self.teacher is not None else 0.0
        loss = torch.zeros((), device=scores.device)
        if share < 1:
            loss = (1 - share) * functional.cross_entropy(scores, labels, label_smoothing=self.label_smoothing)
        if share > 0:
            loss = loss + share * self._distance(scores, images)
        return loss

    def _distance(self, scores: Tensor, images: Tensor) -> Tensor:
        assert self.teacher is not None
        with torch.no_grad():
            wanted = functional.log_softmax(self.teacher(images).float() / self.temperature, dim=1)
        found = functional.log_softmax(scores / self.temperature, dim=1)
        return self.temperature**2 * functional.kl_div(found, wanted, reduction="batchmean", log_target=True)
