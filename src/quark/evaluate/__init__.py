"""How good and how fast a model is, on data that lies on a disk.

    evaluate        top-1, top-5 and milliseconds an image of one model
    compare         two models on the same samples: the paired difference
    measure_speed   best of several timed runs
    prepare_data    an ImageNet download as the two folders that calibration and validation want

A sample is never judged twice and never kept: memory does not grow with the data.
"""

from quark.evaluate.accuracy import Accuracy, AccuracyMeter
from quark.evaluate.comparison import Comparison, compare
from quark.evaluate.datasets import Dataset, open_dataset
from quark.evaluate.evaluation import Evaluation, evaluate
from quark.evaluate.network import Network
from quark.evaluate.prepare import Preparation, prepare_data
from quark.evaluate.speed import Speed, measure_speed

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
    "measure_speed",
    "open_dataset",
    "prepare_data",
]
