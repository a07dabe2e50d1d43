"""The extra option FastFinetune as typed options: what is trained, how long, on what, and where.

BatchSize       a batch has the rows of so many samples: `ROWS_OF_A_SAMPLE` of each
NumBatches      batches of an iteration; 0 or below: all rows
MemOptLevel     0 keeps everything in memory, 1 up to `MemoryLimit`, 2 nothing: activations go to files
InferDevice     keeps the words that it was given; OptimDevice becomes the name that torch has for it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quark.errors import InvalidValueError, unknown_name
from quark.onnx.quantization.config.finetune_devices import check_infer_device, check_optim_device, check_torch
from quark.onnx.quantization.config.option_treatments import Draft
from quark.onnx.refine.options import FinetuneOptions, Reconstruction
from quark.reconstruction.options import ROWS_OF_A_SAMPLE, TRAINED_OP_TYPES, Algorithm, FitOptions

OPTION = "FastFinetune"
NO_LIMIT = 1 << 62  # bytes
_MEGABYTE = 1 << 20
_ADAROUND_RATE = 0.1  # what the parameter of its sigmoid moves by; weights of AdaQuant have no rate that fits all
_OF_ADAROUND = ("RegParam", "BetaRange", "WarmStart")
_EVERY_BATCH = -1

_Setting = tuple[str, Callable[[Any], Any]]
_FIT: Mapping[str, _Setting] = {
    "FixedSeed": ("seed", int),
    "BatchSize": ("batch_rows", lambda value: ROWS_OF_A_SAMPLE * int(value)),
    "NumBatches": ("batches", lambda value: int(value) if value > 0 else _EVERY_BATCH),
    "NumIterations": ("iterations", int),
    "EarlyStop": ("has_early_stop", bool),
    "UpdateBias": ("has_bias", bool),
    "OutputQDQ": ("has_output_rounding", bool),
    "DropRatio": ("drop_ratio", float),
    "LRAdjust": ("lr_adjust", lambda value: (float(value[0]), float(value[1]))),
    "LogPeriod": ("log_period", int),
    "RegParam": ("regularization", float),
    "BetaRange": ("beta_range", lambda value: (float(value[0]), float(value[1]))),
    "WarmStart": ("warm_start", float),
}
_RUN: Mapping[str, _Setting] = {
    "DataSize": ("data_size", int),
    "InferDevice": ("infer_device", str),
    "SelectiveUpdate": ("is_selective", bool),
    "TargetOpType": ("op_types", tuple),
    "CacheDir": ("folder", Path),
    "Reconstruction": ("reconstruction", Reconstruction),
}


def finetune_options(draft: Draft) -> FinetuneOptions:
    """The typed options; torch, and the devices that are asked for, have to be there."""
    given = draft.of("finetune").get("settings", {})
    settings = {name: value for name, value in given.items() if value is not None}
    algorithm = Algorithm(settings.get("OptimAlgorithm", Algorithm.ADAROUND).lower())
    _check_op_types(settings.get("TargetOpType", TRAINED_OP_TYPES))
    if algorithm is Algorithm.ADAQUANT:
        unused = [name for name in _OF_ADAROUND if name in settings]
        draft.remarks += [f"{OPTION}.{name}: it is AdaRound's, and OptimAlgorithm is adaquant" for name in unused]
    check_torch()
    device = check_optim_device(settings.get("OptimDevice", "cpu"))
    check_infer_device(settings.get("InferDevice", "cpu"))
    fit = FitOptions(
        algorithm=algorithm,
        learning_rate=_learning_rate(settings, algorithm),
        device=device,
        **_fields(_FIT, {"BatchSize": 1, **settings}),
    )
    return FinetuneOptions(fit, **_memory(settings), **_fields(_RUN, settings))


def _fields(table: Mapping[str, _Setting], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {field: convert(settings[name]) for name, (field, convert) in table.items() if name in settings}


def _learning_rate(settings: Mapping[str, Any], algorithm: Algorithm) -> float | None:
    """None: found for each layer."""
    usual = _ADAROUND_RATE if algorithm is Algorithm.ADAROUND else "auto"
    rate = settings.get("LearningRate", usual)
    return None if rate == "auto" else float(rate)


def _memory(settings: Mapping[str, Any]) -> dict[str, Any]:
    level = settings.get("MemOptLevel", 1)
    if "MemoryLimit" in settings:
        if level != 1:
            meaning = "no limit" if level == 0 else "nothing in memory"
            raise InvalidValueError(
                f"{OPTION}: MemOptLevel {level} says {meaning}, and MemoryLimit another limit: leave one out"
            )
        return {"memory_limit": int(settings["MemoryLimit"] * _MEGABYTE)}
    return {} if level == 1 else {"memory_limit": NO_LIMIT if level == 0 else 0}


def _check_op_types(op_types: Any) -> None:
    for name in op_types:
        if name not in TRAINED_OP_TYPES:
            raise unknown_name(f"operator type with weights to train ({OPTION}.TargetOpType)", name, TRAINED_OP_TYPES)
    if not op_types:
        raise InvalidValueError(
            f"{OPTION}.TargetOpType is empty, so that nothing would be trained: expected some of "
            f"{', '.join(TRAINED_OP_TYPES)}"
        )
