"""An `AdaRoundConfig` or `AdaQuantConfig` of `algo_config` in the words of the extra option FastFinetune.

Most settings have the option's names, written otherwise: `num_iterations` is NumIterations. What an entry leaves at its
default counts as well, since the two have other defaults: an entry does not train biases unless `update_bias` says so.

`num_workers`, `pin_memory` and `use_gds` say how data travel, and change no result; here there is one way. The rest is
refused where it asks for something.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quark.errors import UnsupportedOptionError
from quark.onnx.quantization.config.algorithm import AdaRoundConfig

_NAMES: Mapping[str, str] = {
    "optim_device": "OptimDevice",
    "infer_device": "InferDevice",
    "fixed_seed": "FixedSeed",
    "data_size": "DataSize",
    "batch_size": "BatchSize",
    "num_batches": "NumBatches",
    "num_iterations": "NumIterations",
    "learning_rate": "LearningRate",
    "early_stop": "EarlyStop",
    "lr_adjust": "LRAdjust",
    "selective_update": "SelectiveUpdate",
    "update_bias": "UpdateBias",
    "output_qdq": "OutputQDQ",
    "drop_ratio": "DropRatio",
    "mem_opt_level": "MemOptLevel",
    "cache_dir": "CacheDir",
    "log_period": "LogPeriod",
}
# Said only where they are not at their default: with AdaQuant they would be remarked on.
_OF_ADAROUND: Mapping[str, str] = {"reg_param": "RegParam", "beta_range": "BetaRange", "warm_start": "WarmStart"}

# What is refused where it is not at its default, with the reason.
_REFUSED: Mapping[str, str] = {
    "output_index": "a layer is judged by its own output, and with selective_update by all outputs of the network",
    "ref_model_path": "the reference is the float model that is being quantized",
    "dynamic_batch": "the batch of the model is no matter: a batch of training has rows from all over the samples",
    "parallel": "a layer is trained on what the layers before it came to, so that none can be trained at the same time",
    "select_max_mem_layer": "memory is bounded for every layer; give the extra option FastFinetune with MemoryLimit",
}


def finetune_settings(entry: AdaRoundConfig) -> dict[str, Any]:
    """The value of the extra option."""
    usual, kind = type(entry)(), type(entry).__name__
    for name, reason in _REFUSED.items():
        if getattr(entry, name) != getattr(usual, name):
            raise UnsupportedOptionError(f"{kind}.{name} = {getattr(entry, name)!r}: {reason}; leave it out")
    settings = {option: getattr(entry, name) for name, option in _NAMES.items()}
    changed = {name: getattr(entry, name) for name in _OF_ADAROUND if getattr(entry, name) != getattr(usual, name)}
    return {
        "OptimAlgorithm": entry.name,
        "TargetOpType": list(entry.target_op_type),
        **{option: value for option, value in settings.items() if value is not None},
        **{_OF_ADAROUND[name]: value for name, value in changed.items()},
    }
