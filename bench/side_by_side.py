"""Networks on the same labelled images, side by side: the best classes of each image, and two networks compared.

All files run in this process, the peers' too: our library has the operators that AMD Quark's files use. The networks
see every batch one after the other, and only the five best classes of each image are kept. A network that fails leaves
the others alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.models import NamedModel
from bench.record import say
from quark.errors import QuarkError
from quark.evaluate import Accuracy, Dataset, Network, open_dataset
from quark.evaluate.comparison import Pair
from quark.evaluate.evaluation import ranked, remarks_on

BATCH_SIZE = 10
FLOAT = "float"

Ranks = NDArray[np.int64]  # the best classes of each image, best first
Key = tuple[str, str]  # preset and who quantized; (FLOAT, "") for the float network


@dataclass(frozen=True)
class Score:
    """One quantized network beside the float network, in percent and in points."""

    top1: float
    top5: float
    difference: float
    standard_error: float
    agreement: float
    gained: int
    lost: int

    def __str__(self) -> str:
        return f"{self.top1:.2f} ({self.difference:+.2f} ± {self.standard_error:.2f})"


def accuracy_of(ranks: Ranks, labels: NDArray[np.int64]) -> Accuracy:
    hits = ranks == labels[:, None]
    return Accuracy(len(labels), float(hits[:, 0].mean()), float(hits.any(axis=1).mean()))


def score(reference: Ranks, ranks: Ranks, labels: NDArray[np.int64]) -> Score:
    """Both networks have seen the same images, in the same order."""
    was_right, is_right = reference[:, 0] == labels, ranks[:, 0] == labels
    gained, lost = int((is_right & ~was_right).sum()), int((was_right & ~is_right).sum())
    pair = Pair(accuracy_of(reference, labels), accuracy_of(ranks, labels), gained, lost)
    return Score(
        top1=100 * pair.second.top1,
        top5=100 * pair.second.top5,
        difference=100 * pair.top1_difference,
        standard_error=100 * pair.standard_error,
        agreement=100 * float((reference[:, 0] == ranks[:, 0]).mean()),
        gained=gained,
        lost=lost,
    )


@dataclass
class Round:
    """Networks that are open at the same time; one that fails leaves, with the reason in `errors`."""

    networks: dict[Key, Network]
    ranks: dict[Key, list[Ranks]]
    errors: dict[Key, str]

    @classmethod
    def open(cls, files: Mapping[Key, Path], threads: int, errors: dict[Key, str]) -> Round:
        opened = cls({}, {key: [] for key in files}, errors)
        for key, path in files.items():
            with opened.failing(key):
                opened.networks[key] = Network(path, threads=threads)
        return opened

    @contextmanager
    def failing(self, key: Key) -> Iterator[None]:
        """What fails in here is that network's failure alone."""
        try:
            yield
        except QuarkError as error:
            self.errors[key] = str(error)
            self.networks.pop(key, None)
            del self.ranks[key]

    def add(self, inputs: dict[str, Any]) -> None:
        for key, network in list(self.networks.items()):
            # a peer may have renamed the input
            feeds = dict(zip((input_.name for input_ in network.inputs), inputs.values(), strict=True))
            with self.failing(key):
                self.ranks[key].append(ranked(network.scores(feeds)))


def rank_all(files: Mapping[Key, Path], data: Dataset, threads: int, errors: dict[Key, str]) -> dict[Key, Ranks]:
    """The best classes of every image by every network; `errors` takes the reasons of those that fail."""
    group = Round.open(files, threads, errors)
    done = 0
    for batch in data.batches(BATCH_SIZE):
        group.add(batch.inputs)
        before, done = done, done + batch.count
        if before * 4 // data.count != done * 4 // data.count:
            say(f"  {done} of {data.count} images")
    return {key: np.concatenate(parts) for key, parts in group.ranks.items()}


def open_labelled(model: NamedModel, val: Path, limit: int | None) -> Dataset:
    """The images for that model, after a first one has gone through."""
    try:
        network = Network(model.path)
        data = open_dataset(val, network, model.preprocessing, limit)
        classes = network.scores(next(data.batches(1)).inputs).shape[1]
    except QuarkError as error:
        raise SystemExit(f"--val {val}: {error}") from error
    if data.labels is None:
        raise SystemExit(f"--val {val}: expected a folder for each class, with images in it")
    for remark in remarks_on(data, classes):
        say(f"{model.name}: {remark}")
    return data
