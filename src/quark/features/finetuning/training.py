"""Code shared by fitting with compiled code and with torch: when to evaluate, when to stop, rates, and parts of a
layer.

The error of rows that training does not see is looked at now and then (AdaRound: at the end, when its weights are
decided), and what was best there is kept: for each output of the layer by itself, since its weights are its own. An
output that never beats the weights as they stood, rounded to the nearest, stays as it was; a layer without any that
did is rolled back. A sum over all outputs would let the loud ones hide what becomes of the quiet ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from quark.errors import InvalidValueError
from quark.features.finetuning.options import Algorithm, FitOptions
from quark.features.finetuning.problem import Array, Part, WeightLayout
from quark.formats.affine import Granularity
from quark.formats.arrays import array_kind
from quark.formats.catalog import get_format
from quark.formats.quantize import affine_neighbours, block_neighbours, element_neighbours, quantize_dequantize
from quark.onnx.calibrate.runner import processor_count
from quark.plan import AffineChoice, BlockChoice, Choice, FloatChoice
from quark.rounded import float_scale, parameters_of

LOOKS = 20  # number of evaluations on held-out rows
LEAST_GAIN = 1e-4  # the smallest gain that counts as an improvement
PATIENCE = 5  # looks without an improvement, after which training stops early
BIAS_SHARE = 1e-3  # AdaRound's learning rate of the bias, relative to the outputs' RMS
AUTO_SHARE = 0.06  # learning rate of AdaQuant, relative to the RMS change that rounding to the nearest makes
AUTO_ADAROUND = 0.03
MEAN_DECAY, SQUARE_DECAY = 0.9, 0.999  # Adam's, as published and in csrc/formats/weight_step_kernels.h
STRETCH, SHIFT = 1.2, -0.1  # constants of AdaRound's sigmoid
UNDECIDED = 0.02  # share of weights that may be between their neighbours at the end


def train(
    options: FitOptions,
    advance: Callable[[int, int], None],
    look: Callable[[], bool],
    is_decided: Callable[[], bool] | None,
) -> int:
    """Call `advance` for one span of iterations after the other, from a number up to another; returns how many there
    were in all.

    `look` compares with the best so far, and returns whether it got better: now and then or, with `is_decided`, at the
    end. With early stopping, training ends when it gets no better any more, or when `is_decided` returns True.
    """
    has_stops = is_decided is None or options.has_early_stop
    period, idle, done = max(1, options.iterations // LOOKS) if has_stops else options.iterations, 0, 0
    while done < options.iterations:
        start, done = done, min(done + period, options.iterations)
        advance(start, done)
        if is_decided is None:
            idle = 0 if look() else idle + 1
            if options.has_early_stop and idle >= PATIENCE:
                return done
        elif options.has_early_stop and is_decided():
            break
    if is_decided is not None:
        look()
    return done


def learning_rate(options: FitOptions, error: float, change: Callable[[], float]) -> float:
    """The learning rate of a layer whose relative error before training is `error`; `change` is the RMS of what
    rounding to the nearest does to its weights.

    AdaQuant moves a weight by about the learning rate at every iteration, so it is a share of what rounding changes
    weights by, which differs a hundredfold between formats and layers. AdaRound's parameter has no unit.
    """
    if options.lr_adjust is not None and error > options.lr_adjust[0]:
        return options.lr_adjust[1]
    if options.learning_rate is not None:
        return options.learning_rate
    return AUTO_ADAROUND if options.algorithm is Algorithm.ADAROUND else AUTO_SHARE * (change() or 1e-5)


def fading(algorithm: Algorithm, progress: float) -> float:
    """The factor of the learning rate at that share of the iterations: half a cosine for AdaQuant."""
    return 1.0 if algorithm is Algorithm.ADAROUND else 0.5 * (1 + math.cos(math.pi * progress))


def beta(options: FitOptions, progress: float) -> float | None:
    """The exponent of AdaRound's regularization at that share of the iterations; None during the warm start."""
    start, end = options.beta_range
    if progress < options.warm_start:
        return None
    along = (progress - options.warm_start) / max(1e-9, 1 - options.warm_start)
    return end + 0.5 * (start - end) * (1 + math.cos(math.pi * min(along, 1.0)))


def batch_starts(iterations: range, batches: int, rows: int, count: int) -> list[int]:
    """The first rows of the batches of iterations, one after the other. Batches of `rows` neighbours lie anywhere among
    the `count` rows, and none is left out. `batches` below 1: every iteration sees all rows, in batches that the last
    may be shorter of."""
    if batches < 1:
        return [*range(0, count, rows)] * len(iterations)
    stride = rows
    while math.gcd(stride, count - rows + 1) != 1:
        stride += 1
    numbers = range(iterations.start * batches, iterations.stop * batches)
    return [number * stride % (count - rows + 1) for number in numbers]


def parts_of(matrices: tuple[int, int, int], work: int, smallest: int, most: int) -> list[Part]:
    """Cut the outputs of a layer into parts that each have work for a thread: 1, 2, 4, 8, ..., but no more than `work`
    or `most`. No part has fewer than `smallest` outputs."""
    groups, outputs, _ = matrices
    length = groups if groups > 1 else outputs
    most = min(work, length // smallest, most)
    count = 1 << max(0, most.bit_length() - 1)
    spans = [slice(length * i // count, length * (i + 1) // count) for i in range(count)]
    if count == 1:
        return [Part()]
    return [Part(groups=span) if groups > 1 else Part(outputs=span) for span in spans]


@contextlib.contextmanager
def side_by_side(count: int) -> Iterator[Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]]:
    """A function that calls another for each of `count` parts, and waits for all of them. Each part has a thread, up to
    the number of processors. They share nothing, so that a thread that the system holds up holds up no other."""
    if count == 1:
        yield lambda function, parts: [function(part) for part in parts]
        return
    with ThreadPoolExecutor(min(count, processor_count())) as pool:
        yield lambda function, parts: list(pool.map(function, parts))


def are_outputs_separate(layout: WeightLayout, choice: Choice) -> bool:
    """True if no two outputs share a block or a scale that follows the weights, so that the weights of one can change
    without the others."""
    if not isinstance(choice, BlockChoice):
        return True
    if choice.quantizer.format.has_tensor_scale and choice.quantizer.tensor_scale is None:
        return False
    groups, outputs, _ = layout.matrices
    owner = np.broadcast_to(np.arange(groups * outputs).reshape(groups, outputs, 1), layout.matrices)
    owners = layout.from_matrices(np.ascontiguousarray(owner))
    axis = choice.axis if owners.ndim > 1 else 0
    return bool((owners == np.take(owners, [0], axis)).all())


def neighbours(array: Array, choice: Choice) -> tuple[Array, Array]:
    """The two numbers that each weight can be rounded to, in float32."""
    wide = np.ascontiguousarray(array, np.float32)
    if isinstance(choice, AffineChoice):
        return affine_neighbours(wide, parameters_of(choice, wide.shape))
    if isinstance(choice, BlockChoice):
        if choice.to_bfloat16_first:
            wide = np.asarray(quantize_dequantize(wide, "bfloat16"))
        return block_neighbours(wide, choice.axis if wide.ndim > 1 else 0, choice.quantizer)
    if isinstance(choice, FloatChoice):
        fmt: Any = get_format(choice.format)
        scale = float_scale(choice, wide.ndim)
        lower, upper = element_neighbours(wide / scale, fmt)
        return lower * scale, upper * scale
    raise InvalidValueError(f"{choice}: its scale is not known before run time")


def affine_numbers(choice: AffineChoice, shape: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Scale, lowest and highest level of each number of a tensor, in float32: x becomes
    clip(round(x / scale), lowest, highest) * scale."""
    parameters = parameters_of(choice, shape)
    spread = Granularity(choice.axis, choice.group_size).spread
    scale, zero_point = (
        np.asarray(spread(array_kind(parameters.scale), parameter, shape), np.float32)
        for parameter in (parameters.scale, parameters.zero_point)
    )
    lowest, highest = (np.float32(bound) - zero_point for bound in (parameters.format.qmin, parameters.format.qmax))
    return scale, lowest, highest
