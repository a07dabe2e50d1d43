"""Training an image classifier, quantized or not: an ordinary loop, on one process or under torchrun.

Trainer           the loop: schedule, early stop, average of the weights, checkpoints, resuming
TrainingOptions   how it is done
Processes         this process and the others; `joined` makes them one run
evaluate_module   top-1 and top-5 of a module on held-out data
"""

from quark.vision.training.divergence import DivergedError
from quark.vision.training.evaluation import Scores, evaluate_module
from quark.vision.training.options import Autocast, OptimizerName, TrainingOptions
from quark.vision.training.processes import Processes, choose_device, joined
from quark.vision.training.trainer import EpochResult, Trainer, TrainingResult

__all__ = [
    "Autocast",
    "DivergedError",
    "EpochResult",
    "OptimizerName",
    "Processes",
    "Scores",
    "Trainer",
    "TrainingOptions",
    "TrainingResult",
    "choose_device",
    "evaluate_module",
    "joined",
]
