"""Distillation of an ONNX model: the network with the plan's quantizers is trained to give the float network's outputs.

Weights and biases of quantized layers change, and the plan's scales stay. It starts from what the features before it
left. The result is kept only if it brings the outputs closer to float, as the written network computes them, on samples
that no weight was fitted to: those that say when to stop, and those that the verdict is about.
"""

from __future__ import annotations

import hashlib
import shutil
from itertools import islice
from pathlib import Path

import onnx_ir as ir
import torch

from quark.account import AlgorithmFacts
from quark.errors import InvalidValueError, ModelError
from quark.features.bias_correction.on_onnx import give_biases
from quark.features.distillation.options import DistillationOptions
from quark.features.distillation.training import Distillation
from quark.features.finetuning.checkpoint import user_cache
from quark.features.finetuning.network import OnnxNetwork, choices_of
from quark.onnx.calibrate.runner import FloatRunner
from quark.onnx.deciding import Decision, Work, quantized_errors
from quark.onnx.progress import track
from quark.onnx.versions import versions
from quark.plan import SkippedNode
from quark.text import get_logger

_LOG = get_logger(__name__)

NAME = "distillation"
FEW_SAMPLES = 256
HELD_BACK = 8  # every eighth calibration sample says when to stop


def before_calibration(work: Work, options: DistillationOptions) -> tuple[AlgorithmFacts, ...]:
    """Give layers a bias, which is trained too. Refuses a device that torch does not have and warns of too few samples,
    before anything takes time."""
    _check_device(options.device)
    if not work.samples.is_random:
        give_biases(work.model)
        if work.samples.rows < FEW_SAMPLES:
            text = (
                "distillation on %d calibration samples: they are soon learned by heart, and the result is dropped then"
            )
            _LOG.warning(f"{text}; give at least %d, better 1000 (num_samples)", work.samples.rows, FEW_SAMPLES)
    return ()


def after_choosing(work: Decision, options: DistillationOptions) -> list[AlgorithmFacts]:
    """Train the constants of the model in place; they stay as they are where that does not help."""
    samples = list(islice(work.samples, work.samples.batches(options.sample_limit)))
    if work.exact is None:
        return []
    if work.samples.is_random or len(samples) < 2 * HELD_BACK:
        return [_nothing(f"it needs at least {2 * HELD_BACK} calibration samples that are not random numbers")]
    held_back = samples[HELD_BACK - 1 :: HELD_BACK]
    judged = [*held_back, *work.samples.held_out]
    folder = _folder(work, work.exact, options)
    state = folder / "state.pt"
    try:
        student, teacher = OnnxNetwork(work.model, choices_of(work.plan)), OnnxNetwork(work.exact)
        with FloatRunner(work.exact, providers=work.settings.calibrate.providers) as runner:
            expected = runner.outputs_of(judged)
        training = [sample for number, sample in enumerate(samples) if number % HELD_BACK != HELD_BACK - 1]
        nodes = {str(node.name): node for node in work.model.graph}
        starts = {str(nodes[name].inputs[1].name): weight for name, weight in work.unrounded.items()}  # type: ignore[union-attr]
        run = Distillation(student, teacher, training, held_back, options, state, starts)
        with track(options.steps, "distilling") as advance:
            result = run.run(advance)
    except ModelError as error:
        return [_nothing(str(error))]
    finally:
        if not state.exists():  # nothing to go on from
            shutil.rmtree(folder, ignore_errors=True)
    if not options.folder:
        shutil.rmtree(folder, ignore_errors=True)
    if result.weights is None:
        return [_nothing(f"{result.steps} steps brought no weights that are closer to float: {result.before:.4g}")]
    before = quantized_errors(work, expected, samples=judged).mean_divergence
    values = work.model.graph.initializers
    standing = {name: values[name].const_value for name in result.weights}
    for name, array in result.weights.items():
        old = standing[name]
        assert old is not None, name
        new = array.reshape(tuple(old.shape.numpy())).astype(old.dtype.numpy())
        values[name].const_value = ir.tensor(new, name=name)
    after = quantized_errors(work, expected, samples=judged).mean_divergence  # the divergence that training minimized
    if after >= before:
        for name, old in standing.items():
            values[name].const_value = old
        return [_nothing(f"the outputs on held-out samples got no better: error {before:.4g}, after it {after:.4g}")]
    phrase = f"divergence {result.before:.4g} became {result.after:.4g} after {result.steps} steps"
    return [AlgorithmFacts(NAME, tuple(f"{name}: {phrase}" for name in result.weights), ())]


def _check_device(name: str) -> None:
    """Raise an error if torch cannot train there."""
    kind, _, number = name.partition(":")
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if (f"cuda:{number or 0}" if kind == "cuda" else name) not in devices:
        raise InvalidValueError(
            f"DistillationDevice '{name}': torch has no such device here, only {', '.join(devices)}"
        )


def _nothing(reason: str) -> AlgorithmFacts:
    return AlgorithmFacts(NAME, (), (SkippedNode("", "", reason),))


def _folder(work: Decision, exact: ir.Model, options: DistillationOptions) -> Path:
    """The folder of the state, named by a hash of everything that the result follows from."""
    digests = [FloatRunner(model).model_digest() for model in (exact, work.model)]
    facts = [*digests, work.plan.digest, work.samples.digest(), repr(options), repr(sorted(versions().items()))]
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:32]
    folder = (Path(options.folder) if options.folder else user_cache()) / f"distill-{key}"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
