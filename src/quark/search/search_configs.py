"""Ready-made settings of AutoSearchPro, by name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from quark.errors import unknown_name

_CLE = {"cle_algo": ["cle", None], "cle_params": {"cle_steps": [-1, 1], "only_if": {"cle_algo": "cle"}}}
_OTHERS: Mapping[str, Any] = {
    "specific_layer_config": [None],
    "layer_type_config": [None],
    "exclude": [None],
    "use_external_data_format": [False],
    "OptimizeModel": [True],
}
_ALIGNED: Mapping[str, Any] = {"AlignSlice": [False], "FoldRelu": [True], "AlignConcat": [True]}
_DEVICE: Mapping[str, Any] = {
    "optim_device": ["cuda:0"],
    "infer_device": ["cuda:0"],
    "batch_size": [2],
    "early_stop": [True],
}


def _training(most_iterations: int, most_rate: float, data_size: int, *, has_full_adaround: bool) -> dict[str, Any]:
    """AdaRound and AdaQuant with ranges for iterations and learning rate."""
    iterations = {"type": "int", "low": 3000, "high": most_iterations, "step": 3000}
    adaquant = {
        "num_iterations": iterations,
        "learning_rate": {"type": "float", "low": 1e-6, "high": most_rate, "log": True},
        **_DEVICE,
        "data_size": [data_size],
        "only_if": {"algorithms": "adaquant"},
    }
    adaround = {
        "num_iterations": iterations,
        "learning_rate": {"type": "float", "low": 1e-2, "high": 1e-1, "log": True},
        **({**_DEVICE, "data_size": [data_size]} if has_full_adaround else {}),
        "only_if": {"algorithms": "adaround"},
    }
    return {"algorithms": ["adaround", "adaquant"], "adaquant_params": adaquant, "adaround_params": adaround}


def _integers(activation: str, methods: list[str], **more: Any) -> dict[str, Any]:
    return {
        "activation": [activation],
        "activation_params": {"symmetric": [True, False], "calibration_method": methods, "only_if": "activation"},
        "weight": ["Int8Spec"],
        "weight_params": {"symmetric": [True], "quant_granularity": ["Tensor"], "only_if": "weight"},
        **_CLE,
        **_training(20000, 1e-4, 1000, has_full_adaround=False),
        **_OTHERS,
        **_ALIGNED,
        **more,
    }


_SPACES: Mapping[str, Any] = {
    "ADVANCED_SEARCH": {
        "activation": ["Int8Spec"],
        "activation_params": {
            "symmetric": [True, False],
            "calibration_method": ["MinMax", "Percentile", "LayerwisePercentile"],
            "scale_type": ["Float32"],
            "quant_granularity": ["Tensor"],
            "only_if": "activation",
        },
        "weight": ["Int8Spec"],
        "weight_params": {"symmetric": [True], "calibration_method": ["MinMax", "MinMSE"], "only_if": "weight"},
        **_CLE,
        **_training(30000, 1e-3, 3000, has_full_adaround=True),
        **_OTHERS,
    },
    "XINT8_SEARCH": {
        "activation": ["XInt8Spec"],
        "activation_params": {"symmetric": [True], "calibration_method": ["MinMSE"], "only_if": "activation"},
        "weight": ["XInt8Spec"],
        "weight_params": {"symmetric": [True], "quant_granularity": ["Tensor"], "only_if": "weight"},
        **_CLE,
        **_training(20000, 1e-4, 1000, has_full_adaround=False),
        **_OTHERS,
    },
    "A8W8_SEARCH": _integers(
        "Int8Spec",
        ["MinMax", "Percentile", "LayerwisePercentile"],
        PercentileCandidates=[[99.99, 99.999, 99.9999], [99.0, 99.9, 99.99, 99.999, 99.9999]],
    ),
    "A16W8_SEARCH": _integers("Int16Spec", ["MinMax", "Percentile"], AlignEltwiseQuantType=[True]),
}
DEFAULTS: Mapping[str, Any] = {
    "n_trials": 20,
    "n_jobs": 1,
    "output_dir": "./output",
    "temp_dir": "./temp_dir",
    "search_algo": "TPE",
    "search_evaluator": None,
    "search_metric": None,
    "direction": "minimize",
    "base_framework": "onnx",
    "study_storage_db": "auto_search.db",
    "load_study_if_exists": True,
    "study_name": "AutoSearch",
    "model_input": None,
    "calib_data_reader": None,
    "eval_data_reader": None,
    "two_stage_search": True,
    "plot_results": False,
    "seed": 0,
}


def get_auto_search_config(config_name: str) -> dict[str, Any]:
    """Return settings for AutoSearchPro, to which model and data are to be added. A new object every time.

    The names are ADVANCED_SEARCH, XINT8_SEARCH, A8W8_SEARCH and A16W8_SEARCH.
    """
    if config_name not in _SPACES:
        raise unknown_name("search config", config_name, _SPACES)
    return copy.deepcopy({"search_space": dict(_SPACES[config_name]), **DEFAULTS})
