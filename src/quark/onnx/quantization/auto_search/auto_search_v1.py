"""AutoSearch and its parts at the import path that existing scripts use."""

from quark.onnx.quantization.auto_search.lookup import lookup

_NAMES = (
    "AutoSearch",
    "AutoSearchConfig",
    "SearchSpace",
    "cos_metric",
    "l1_metric",
    "l2_metric",
    "logger_config",
    "psnr_metric",
    "split_config_levels",
    "ssim_metric",
)

__all__ = list(_NAMES)

__getattr__ = lookup(__name__, _NAMES)
