"""A network and images small enough to train in tests: four classes, told apart by which quarter is bright."""

from __future__ import annotations

import torch
from torch import nn

from quark.vision.data import ArrayBatches, ArrayHeldOut, Arrays
from quark.vision.training import OptimizerName, Processes, TrainingOptions

SIZE, CLASSES = 8, 4


def tiny_arrays(count=96, seed=0):
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=random)
    images = torch.randint(0, 120, (count, SIZE, SIZE, 3), generator=random, dtype=torch.uint8)
    half = SIZE // 2
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[row * half : (row + 1) * half, column * half : (column + 1) * half] += 100
    return Arrays(images, labels)


def tiny_network(seed=0, has_batch_norm=True, dropout=0.1):
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(8) if has_batch_norm else nn.Identity()
    body = [nn.Conv2d(3, 8, 3, 2, 1, bias=not has_batch_norm), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*body, nn.Dropout(dropout), nn.Linear(32, CLASSES))


def tiny_quantized_network(seed=0):
    """The same with learned thresholds, and the rules of an NPU."""
    from quark.torch import ModelQuantizer  # here: processes that train in float start sooner without it
    from quark.vision.quantizing import Method, recipe

    data = tiny_arrays(count=32, seed=2)
    config = recipe(Method.TQT)
    config.algo_config = []
    return ModelQuantizer(config).quantize_model(tiny_network(seed), ArrayHeldOut(data, 16))


def tiny_options(**changes):
    """For networks that have learned nothing yet."""
    return TrainingOptions(**{"optimizer": OptimizerName.SGD, "batch_norm_share": 1.0, **changes})


def tiny_data(batch_size=16, processes=None):
    """Images to train on and others to judge by; no augmentation, which would move the bright quarter."""
    processes = processes or Processes()
    training = ArrayBatches(tiny_arrays(), batch_size, processes=processes, is_augmented=False)
    return training, ArrayHeldOut(tiny_arrays(50, seed=1), 16, processes=processes)


def state_differences(first, second):
    """The names of a state dict that are not equal to the bit."""
    return [name for name, each in first.items() if not torch.equal(each, second[name])]
