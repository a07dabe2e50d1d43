"""Training of image classifiers, quantized or not, in one process or with torchrun.

Trainer           the loop: schedule, early stop, average of the weights, checkpoints, resuming
TrainingOptions   its options
Processes         this process and the others of the run; `joined` connects them
evaluate_module   top-1 and top-5 of a module on held-out data
"""

from quark.vision.training.evaluation import Scores, evaluate_module
from quark.vision.training.processes import Processes, choose_device, joined
from quark.vision.training.step import Autocast, OptimizerName, TrainingOptions
from quark.vision.training.trainer import DivergedError, EpochResult, Trainer, TrainingResult

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
