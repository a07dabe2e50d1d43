"""Finetuning as a config asks for it: the extra option FastFinetune, or an AdaRoundConfig or AdaQuantConfig.

An entry of `algo_config` counts with its defaults, which differ from the option's: it does not train biases unless
`update_bias` says so. Its `output_index` of 0, the default, stands for all outputs; the option's 0 is the first one.

torch trains on 'cpu' or 'cuda:N'; its builds for AMD's GPUs call theirs 'cuda' as well, so 'hip:N' means that. torch is
imported here only to ask for a device that is not the CPU.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from quark.devices import Device
from quark.errors import InvalidValueError, MissingDependencyError, QuarkError, UnsupportedOptionError, unknown_name
from quark.features.finetuning.options import (
    ROWS_OF_A_SAMPLE,
    TRAINED_OP_TYPES,
    Algorithm,
    FinetuneOptions,
    FitOptions,
    Reconstruction,
)
from quark.onnx.quantization.config.algorithm import AdaRoundConfig
from quark.onnx.quantization.config.option_kinds import (
    BOOL,
    DEVICE,
    NAMES,
    PATH,
    TWO_NUMBERS,
    Kind,
    integer,
    is_number,
    number_from,
    number_or,
    one_of,
    optional,
)
from quark.onnx.quantization.config.option_treatments import Draft
from quark.onnx.quantization.config.run_fields import CROSS_LAYER, SMOOTH, switched_on

OPTION = "FastFinetune"
NO_LIMIT = 1 << 62  # bytes
_MEGABYTE = 1 << 20
_ADAROUND_RATE = 0.1  # for the parameter of its sigmoid; no single rate suits the weights that AdaQuant trains
_OF_ADAROUND = ("RegParam", "BetaRange", "WarmStart")
_EVERY_BATCH = -1
# Settings of an entry that count only where they differ from their defaults; others would be remarked on.
_UNSAID_BY_DEFAULT = (*_OF_ADAROUND, "OutputIndex", "NumWorkers")

_ALGORITHMS = tuple(algorithm.value for algorithm in Algorithm)
_ALGORITHM = Kind(
    "one of " + ", ".join(_ALGORITHMS), lambda value: isinstance(value, str), lambda value: value.lower() in _ALGORITHMS
)
_RATE = Kind("a number above 0", is_number, lambda value: value > 0 and isfinite(value))
_LR_ADJUST = Kind(
    "two numbers: an error, and the learning rate above it, which is above 0",
    lambda value: value in ((), []) or TWO_NUMBERS.has_type(value),
    lambda value: not value or (value[0] >= 0 and _RATE.is_legal(value[1])),
)
_BETAS = Kind(
    "two numbers of at least 1, the first and the last",
    TWO_NUMBERS.has_type,
    lambda value: all(number >= 1 and isfinite(number) for number in value),
)


def _pair(value: Any) -> tuple[float, float]:
    return float(value[0]), float(value[1])


@dataclass(frozen=True)
class _Setting:
    """A key of FastFinetune: what it may be, its name in an entry of `algo_config`, and the field that it sets, of
    FitOptions after 'fit.', else of FinetuneOptions. Keys without a field are read by name."""

    kind: Kind
    attribute: str = ""
    field: str = ""
    convert: Callable[[Any], Any] = lambda value: value
    remark: str = ""  # the reason why the key cannot change a result; false values have no effect


_SETTINGS: Mapping[str, _Setting] = {
    "DataSize": _Setting(integer(1), "data_size", "data_size", int),
    "FixedSeed": _Setting(integer(0), "fixed_seed", "fit.seed", int),
    # the number of samples in a batch
    "BatchSize": _Setting(integer(1), "batch_size", "fit.batch_rows", lambda value: ROWS_OF_A_SAMPLE * int(value)),
    # per iteration; 0 or below: all rows
    "NumBatches": _Setting(
        integer(), "num_batches", "fit.batches", lambda value: int(value) if value > 0 else _EVERY_BATCH
    ),
    "NumIterations": _Setting(integer(0), "num_iterations", "fit.iterations", int),
    "LearningRate": _Setting(number_or("auto", _RATE), "learning_rate"),
    "OptimAlgorithm": _Setting(_ALGORITHM),
    "OptimDevice": _Setting(DEVICE, "optim_device"),
    "InferDevice": _Setting(DEVICE, "infer_device", "infer_device"),
    "EarlyStop": _Setting(BOOL, "early_stop", "fit.has_early_stop"),
    "SelectiveUpdate": _Setting(BOOL, "selective_update", "is_selective"),
    "LRAdjust": _Setting(
        optional(_LR_ADJUST), "lr_adjust", "fit.lr_adjust", lambda value: _pair(value) if value else None
    ),
    "TargetOpType": _Setting(NAMES, "target_op_type", "op_types", tuple),
    "UpdateBias": _Setting(BOOL, "update_bias", "fit.has_bias"),
    "OutputQDQ": _Setting(BOOL, "output_qdq", "fit.has_output_rounding"),
    "DropRatio": _Setting(number_from(0, 1), "drop_ratio", "fit.drop_ratio", float),
    # 0 keeps everything in memory, 1 up to MemoryLimit, 2 nothing: activations go to files
    "MemOptLevel": _Setting(integer(0, 2), "mem_opt_level"),
    "CacheDir": _Setting(optional(PATH), "cache_dir", "folder", Path),
    "LogPeriod": _Setting(integer(1), "log_period", "fit.log_period", int),
    "MemoryLimit": _Setting(number_from(0)),
    "Reconstruction": _Setting(
        one_of(*(reconstruction.value for reconstruction in Reconstruction)), "", "reconstruction", Reconstruction
    ),
    "RegParam": _Setting(number_from(0), "reg_param", "fit.regularization", float),
    "BetaRange": _Setting(_BETAS, "beta_range", "fit.beta_range", _pair),
    "WarmStart": _Setting(number_from(0, 1), "warm_start", "fit.warm_start", float),
    "OutputIndex": _Setting(optional(integer(0)), "output_index", "output_index", int),
    "RefModelPath": _Setting(optional(PATH), "ref_model_path", "reference", Path),
    "Parallel": _Setting(BOOL, "parallel", "is_parallel"),
    "SelectMaxMemLayer": _Setting(BOOL, "select_max_mem_layer", "is_largest_only"),
    "DynamicBatch": _Setting(
        BOOL, "dynamic_batch", remark="a batch of training has rows from all samples, whatever batch the model takes"
    ),
    "NumWorkers": _Setting(integer(0), "num_workers", remark="no processes load data: rows are read from memory"),
    "PinMemory": _Setting(BOOL, "pin_memory", remark="rows are moved to the device once, not batch by batch"),
    "UseGDS": _Setting(BOOL, "use_gds", remark="rows are moved to the device once, not read from files batch by batch"),
}
FINETUNE_KEYS: Mapping[str, Kind] = {name: setting.kind for name, setting in _SETTINGS.items()}


def finetune_settings(entry: AdaRoundConfig) -> dict[str, Any]:
    """The settings of an entry of `algo_config`, by the keys of FastFinetune."""
    usual, given = vars(type(entry)()), vars(entry)
    settings: dict[str, Any] = {"OptimAlgorithm": entry.name}
    for key, row in _SETTINGS.items():
        value = given.get(row.attribute)
        is_unsaid = key in _UNSAID_BY_DEFAULT and value == usual[row.attribute]
        if value is not None and not is_unsaid:
            settings[key] = list(value) if key == "TargetOpType" and isinstance(value, tuple) else value
    return settings


def is_torch_installed() -> bool:
    """True if torch can be imported. It is looked for, and not imported."""
    if "torch" in sys.modules:  # a None there forbids the import
        return sys.modules["torch"] is not None
    return importlib.util.find_spec("torch") is not None


def finetune_options(draft: Draft) -> FinetuneOptions:
    """The typed options. Raises an error if torch or a device that is asked for is missing."""
    settings = {name: value for name, value in draft.of("finetune").get("settings", {}).items() if value is not None}
    algorithm = Algorithm(settings.get("OptimAlgorithm", Algorithm.ADAROUND).lower())
    op_types = settings.get("TargetOpType", TRAINED_OP_TYPES)
    for name in op_types:
        if name not in TRAINED_OP_TYPES:
            raise unknown_name(f"operator type with weights to train ({OPTION}.TargetOpType)", name, TRAINED_OP_TYPES)
    if not op_types:
        raise InvalidValueError(
            f"{OPTION}.TargetOpType is empty, so that nothing would be trained: expected some of "
            f"{', '.join(TRAINED_OP_TYPES)}"
        )
    if algorithm is Algorithm.ADAQUANT:
        unused = [name for name in _OF_ADAROUND if name in settings]
        draft.remarks += [f"{OPTION}.{name}: it is AdaRound's, and OptimAlgorithm is adaquant" for name in unused]
    needless = [name for name, value in settings.items() if _SETTINGS[name].remark and value]
    draft.remarks += [f"{OPTION}.{name}: {_SETTINGS[name].remark}" for name in needless]
    _check_reference(draft, settings)
    if not is_torch_installed():
        raise MissingDependencyError(
            "finetuning (include_fast_ft=True) trains with torch, which is not installed: "
            "pip install torch, or set include_fast_ft=False"
        )
    device = _checked_optim_device(settings.get("OptimDevice", "cpu"))
    settings["InferDevice"] = _infer_device(draft, settings.get("InferDevice", "cpu"))
    memory: dict[str, Any] = {}
    level = settings.get("MemOptLevel", 1)
    if "MemoryLimit" in settings:
        if level != 1:
            meaning = "no limit" if level == 0 else "nothing in memory"
            raise InvalidValueError(
                f"{OPTION}: MemOptLevel {level} says {meaning}, and MemoryLimit another limit: leave one out"
            )
        memory = {"memory_limit": int(settings["MemoryLimit"] * _MEGABYTE)}
    elif level != 1:
        memory = {"memory_limit": NO_LIMIT if level == 0 else 0}
    rate = settings.get("LearningRate", _ADAROUND_RATE if algorithm is Algorithm.ADAROUND else "auto")
    values = {
        _SETTINGS[name].field: _SETTINGS[name].convert(value) for name, value in {"BatchSize": 1, **settings}.items()
    }
    fit = FitOptions(
        algorithm=algorithm,
        learning_rate=None if rate == "auto" else float(rate),  # None: found for each layer
        device=device,
        **{name.removeprefix("fit."): value for name, value in values.items() if name.startswith("fit.")},
    )
    run = {name: value for name, value in values.items() if name and not name.startswith("fit.")}
    run = {"folder": draft.of("finetune").get("folder"), **run}  # beside the file of SaveAndRestore
    return FinetuneOptions(fit, **memory, **run)


def _check_reference(draft: Draft, settings: Mapping[str, Any]) -> None:
    """Raise an error if the reference is not a file, or its layers cannot be compared with those of the model."""
    if "RefModelPath" not in settings:
        return
    path = Path(settings["RefModelPath"])
    if not path.is_file():
        raise InvalidValueError(f"{OPTION}.RefModelPath '{path}': there is no such file; expected a float ONNX model")
    rescaling = sorted({CROSS_LAYER, SMOOTH} & switched_on(draft.run))
    if rescaling:
        raise UnsupportedOptionError(
            f"{OPTION}.RefModelPath with {rescaling[0]}: it rescales between layers, so that the layers of the "
            "reference are on another scale; leave one out"
        )


def _checked_optim_device(device: str) -> str:
    """Return torch's name for the device."""
    if device == "cpu":
        return device
    cuda: Any = importlib.import_module("torch").cuda
    count = cuda.device_count() if cuda.is_available() else 0
    if count <= _number(device):
        there = ", ".join(["cpu", *(f"cuda:{number}" for number in range(count))])
        raise InvalidValueError(
            f"FastFinetune.OptimDevice {device!r}: torch has no such device here, only {there}. Another build of "
            "torch, for CUDA or for ROCm, may have it"
        )
    return f"cuda:{_number(device)}"


def _infer_device(draft: Draft, given: str) -> str:
    """Return where the walk between layers is computed: where FastFinetune says, or the device of the whole run."""
    if given == "cpu":
        return str(draft.of("calibrate").get("providers", ["cpu"])[0])
    try:
        Device.parse(given).check()
    except QuarkError as error:
        raise type(error)(f"FastFinetune.InferDevice, {error}") from error
    return given


def _number(device: str) -> int:
    return int(device.partition(":")[2] or 0)
