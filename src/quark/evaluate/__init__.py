"""Accuracy and speed of models, on data from disk.

    evaluate        top-1, top-5 and milliseconds per image of one model
    compare         two models on the same samples: the paired difference
    measure_speed   best of several timed runs; measure_in_turns does it for several models
    prepare_data    sorts an ImageNet download into folders for calibration and validation

Samples are not kept, so memory does not grow with the data.
"""

from quark.evaluate.comparison import Comparison, compare
from quark.evaluate.datasets import Dataset, Preparation, open_dataset, prepare_data
from quark.evaluate.evaluation import (
    Accuracy,
    AccuracyMeter,
    Evaluation,
    Speed,
    evaluate,
    measure_in_turns,
    measure_speed,
)
from quark.evaluate.network import Network

__all__ = [
    "Accuracy",
    "AccuracyMeter",
    "Comparison",
    "Dataset",
    "Evaluation",
    "Network",
    "Preparation",
    "Speed",
    "compare",
    "evaluate",
    "measure_in_turns",
    "measure_speed",
    "open_dataset",
    "prepare_data",
]
