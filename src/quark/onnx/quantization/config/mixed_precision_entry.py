"""An `AutoMixprecisionConfig` of `algo_config` in the words of the extra option AutoMixprecision.

    target_layer_config      TargetLayerConfig
    target_op_type           TargetOpType
    include_layers           IncludeLayers          exclude_layers   ExcludeLayers
    data_size                SampleLimit            0: the usual number
    metric_output_index      OutputIndex
    metric_evaluate_fn       EvaluateFunction, with metric_threshold as Top1AccTarget
    metric_default           'l2': metric_threshold is L2Target; 'sqnr': SQNRTarget, with the other sign
    metric_threshold         0: no limit, all layers are lowered
    sensitivity_cache_file   PlanFile

`dual_quant_nodes` and `shared_param_mode` ask how a graph is changed afterwards; here every reader has its own
quantizer from the start, whatever they say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError
from quark.onnx.quantization.config.algorithm import AutoMixprecisionConfig
from quark.onnx.quantization.config.spec import QLayerConfig

# What is refused where it is not at its default, with the reason.
_REFUSED: Mapping[str, str] = {
    "subgraph_json": "layers are mixed one by one, not by subgraphs; leave it out",
    "metric_distance_fn": "use metric_evaluate_fn, or metric_default 'l2' or 'sqnr'",
    "metric_optimize_object": "layers go from the higher types to the lower ones, which is 'speed'; for the best "
    "quality within a size give the extra option AutoMixprecision with BitsTarget",
    "worker_num": "layers are measured one after another, each by all processors; leave it out",
    "no_input_qdq_shared": "every reader has its own quantizer, so that none is shared; leave it out",
}


def mixed_precision_settings(entry: AutoMixprecisionConfig) -> dict[str, Any]:
    """The value of the extra option."""
    usual = AutoMixprecisionConfig()
    for name, reason in _REFUSED.items():
        if getattr(entry, name) != getattr(usual, name):
            raise UnsupportedOptionError(f"AutoMixprecisionConfig.{name} = {getattr(entry, name)!r}: {reason}")
    if not isinstance(entry.target_layer_config, QLayerConfig):
        raise UnsupportedTypeError(
            f"AutoMixprecisionConfig.target_layer_config: expected a QLayerConfig with the lower types, got "
            f"{entry.target_layer_config!r}"
        )
    settings = {
        "TargetLayerConfig": entry.target_layer_config,
        "TargetOpType": list(entry.target_op_type),
        "OutputIndex": entry.metric_output_index,
        **_target(entry),
    }
    optional = {
        "IncludeLayers": list(entry.include_layers),
        "ExcludeLayers": list(entry.exclude_layers),
        "SampleLimit": entry.data_size,
        "PlanFile": entry.sensitivity_cache_file,
    }
    return settings | {name: value for name, value in optional.items() if value}


def _target(entry: AutoMixprecisionConfig) -> dict[str, Any]:
    threshold = entry.metric_threshold
    if threshold is None:
        raise UnsupportedOptionError(
            "AutoMixprecisionConfig.metric_threshold = None: to see sensitivities alone, give sensitivity_cache_file "
            "and read that file; the model is mixed in any case"
        )
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
        raise UnsupportedTypeError(f"AutoMixprecisionConfig.metric_threshold {threshold!r}: expected a number")
    if entry.metric_evaluate_fn is not None:
        drop = threshold if threshold else math.inf
        return {"EvaluateFunction": entry.metric_evaluate_fn, "Top1AccTarget": drop}
    if entry.metric_default not in ("l2", "sqnr"):
        raise InvalidValueError(
            f"AutoMixprecisionConfig.metric_default {entry.metric_default!r}: expected l2 or sqnr, or give a function "
            "as metric_evaluate_fn"
        )
    if entry.metric_default == "l2":
        return {"L2Target": threshold or math.inf}
    return {"SQNRTarget": -threshold if threshold else -math.inf}
