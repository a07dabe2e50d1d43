"""EvalMetrics: cosine and L2 distance between the outputs of the float and the quantized model, sample by sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from quark.compare.measures import pair_sums
from quark.onnx.calibrate import FloatRunner
from quark.onnx.comparing import session_run
from quark.onnx.data import Samples
from quark.onnx.large_tensors import Message
from quark.onnx.session import open_session, release_memory
from quark.report.quantities import count_of


@dataclass(frozen=True)
class Evaluation:
    """Cosine and L2 distance of one output for each sample."""

    output: str
    cosines: tuple[float, ...]
    distances: tuple[float, ...]

    def __str__(self) -> str:
        count = len(self.cosines)
        cosine = f"cosine {sum(self.cosines) / count:.6f}, lowest {min(self.cosines):.6f}"
        distance = f"L2 distance {sum(self.distances) / count:.6g}, largest {max(self.distances):.6g}"
        return f"output '{self.output}' over {count_of(count, 'sample')}: mean {cosine}; mean {distance}"


def evaluate(exact: ir.Model | None, message: Message, samples: Samples, providers: Sequence[str]) -> list[Evaluation]:
    """Run both models on the samples that are for evaluation, and compare the outputs that are floats. Returns an empty
    list if there are none."""
    if exact is None or samples.evaluated is None:
        return []
    cosines: dict[str, list[float]] = {}
    distances: dict[str, list[float]] = {}
    run = session_run(open_session(message, providers=tuple(providers)))
    with FloatRunner(exact, providers=tuple(providers)) as runner:
        for sample in samples.evaluated.in_order():
            wanted = {name: output for name, output in runner.outputs(sample).items() if output.dtype.kind == "f"}
            actual = run(sample, list(wanted)) if wanted else {}
            for name, reference in wanted.items():
                sums = pair_sums(reference, actual[name])
                cosines.setdefault(name, []).append(sums.cosine)
                distances.setdefault(name, []).append(float("inf") if sums.is_broken else sums.error**0.5)
    del run
    release_memory()
    return [Evaluation(name, tuple(cosines[name]), tuple(distances[name])) for name in cosines]
