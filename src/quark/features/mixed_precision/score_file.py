"""The scores of layers in a file, for the next run, in the layout of AMD Quark.

    {"version": "1.0", "cache_key": "...", "results": [{"name": "conv1", "candidate_nodes": ["conv1"], "score": 0.1,
     "all_config_scores": [0.1], "best_config_index": 0, "enabled": true}]}

`enabled` is for people: a layer or subgraph with false stays as it is. `cache_key` is a digest of all that the scores
follow from; a file with another one is measured and written again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quark.errors import InvalidValueError
from quark.files.foreign import REPORT, Fields, read_json
from quark.onnx.save import write_text

VERSION = "1.0"
_LARGEST = 1e300


@dataclass(frozen=True)
class UnitScore:
    """The scores of layers that are mixed together, with each of the types; `target` is the number of the best."""

    name: str
    layers: tuple[str, ...]
    scores: tuple[float, ...]
    target: int
    is_enabled: bool = True

    @property
    def score(self) -> float:
        return self.scores[self.target]


def read_scores(path: Path) -> tuple[str, dict[str, UnitScore]] | None:
    """The key and the scores of a file, by the names of layers or subgraphs; None if there is no file yet."""
    label = f"AutoMixprecision.SensitivityCacheFile '{path}'"
    if not path.exists():
        if not path.parent.is_dir():
            raise InvalidValueError(f"{label}: there is no folder '{path.parent}'")
        return None
    content = Fields(read_json(path, label, REPORT), label)
    read = {}
    for mapping in content.mappings("results"):
        scores = [float(x) if isinstance(x, (int, float)) else math.nan for x in mapping.array("all_config_scores")]
        target = mapping.integer("best_config_index")
        if not scores or any(map(math.isnan, scores)) or target >= len(scores):
            mapping.refuse(
                "all_config_scores", "a list of numbers, one for each of the types, and the index of the best"
            )
        is_enabled = mapping.boolean("enabled") if mapping.has("enabled") else True
        name = mapping.text("name")
        read[name] = UnitScore(name, mapping.texts("candidate_nodes"), tuple(scores), target, is_enabled)
    return content.text("cache_key"), read


def write_scores(path: Path, key: str, scores: Sequence[UnitScore]) -> None:
    """Write the scores, the smallest first."""
    results = [
        {
            "name": entry.name,
            "candidate_nodes": list(entry.layers),
            "score": _finite(entry.score),
            "all_config_scores": [_finite(score) for score in entry.scores],
            "best_config_index": entry.target,
            "enabled": entry.is_enabled,
        }
        for entry in sorted(scores, key=lambda entry: entry.score)
    ]
    write_text(json.dumps({"version": VERSION, "cache_key": key, "results": results}, indent=2) + "\n", path)


def _finite(score: float) -> float:
    """The score as JSON can hold it."""
    return max(-_LARGEST, min(_LARGEST, score))
