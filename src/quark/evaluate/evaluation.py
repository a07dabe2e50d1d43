"""Top-1, top-5 and speed of one model on labelled data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quark.errors import InvalidValueError
from quark.evaluate.accuracy import Accuracy, AccuracyMeter
from quark.evaluate.datasets import Dataset
from quark.evaluate.network import Network
from quark.evaluate.speed import Speed, measure_speed
from quark.onnx.progress import track

DEFAULT_BATCH_SIZE = 10


@dataclass(frozen=True)
class Evaluation:
    """One model on one set of data."""

    model: str
    data: str
    accuracy: Accuracy
    speed: Speed
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Accuracies in percent, as tables have them."""
        return {
            "model": self.model,
            "data": self.data,
            "samples": self.accuracy.count,
            "top1_percent": 100 * self.accuracy.top1,
            "top5_percent": 100 * self.accuracy.top5,
            **asdict(self.speed),
            "remarks": list(self.remarks),
        }


def evaluate(network: Network, data: Dataset, batch_size: int = DEFAULT_BATCH_SIZE) -> Evaluation:
    """Run the network over all of the data, batch by batch."""
    if not data.has_labels:
        raise InvalidValueError(
            f"data '{data.source}' has no labels: expected a folder for each class with images in it, a labels "
            f"file, or in an .npz an array 'labels'; 'quark compare' needs none"
        )
    meter, speed, classes = AccuracyMeter(), None, 0
    with track(data.count, f"evaluating {network.name}") as advance:
        for batch in data.batches(batch_size):
            scores = network.scores(batch.inputs)
            assert batch.labels is not None
            meter.add(scores, batch.labels)
            classes = scores.shape[1]
            if speed is None:
                speed = measure_speed(network, batch.inputs)
            for _ in batch.labels:
                advance()
    accuracy = meter.result()
    assert speed is not None
    return Evaluation(network.name, data.source, accuracy, speed, remarks_on(data, classes))


def remarks_on(data: Dataset, classes: int) -> tuple[str, ...]:
    """What makes an accuracy doubtful."""
    if data.classes is not None and data.classes != classes:
        doubt = f"the data has {data.classes} folders and the model {classes} classes"
        return (f"{doubt}: the first folder counts as class 0, the next as class 1, and so on",)
    return ()
