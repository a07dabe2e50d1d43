"""The accuracy algorithms that a QConfig can list, and their settings.

`algorithm_options` turns them into the typed options of the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

from quark.errors import UnsupportedTypeError, refuse_unknown_fields, unknown_name
from quark.features.finetuning.options import TRAINED_OP_TYPES
from quark.files.foreign import short
from quark.onnx.quantization.config.content import plain, refuse_function
from quark.onnx.quantization.config.spec import QLayerConfig, refuse_unknown_keys


@refuse_unknown_fields
@dataclass
class AlgoConfig:
    """An algorithm with its settings."""

    name: ClassVar[str] = ""

    def to_dict(self, on_function: Callable[[str], Any] = refuse_function) -> dict[str, Any]:
        """Its name and the settings that differ from the defaults, as JSON can hold them.

        A function among them is an error, or becomes what `on_function` returns for its name.

        >>> SmoothQuantConfig(alpha=0.7).to_dict()
        {'name': 'smooth_quant', 'alpha': 0.7}
        """
        usual = vars(type(self)())
        given = {key: tuple(value) if isinstance(value, list) else value for key, value in vars(self).items()}
        changed = {key: plain(value, key, on_function) for key, value in given.items() if value != usual[key]}
        return {"name": self.name, **changed}

    @staticmethod
    def from_dict(content: dict[str, Any]) -> AlgoConfig:
        """The algorithm that `to_dict` wrote."""
        if not isinstance(content, dict):
            raise UnsupportedTypeError(f"algorithm: expected a mapping with its name, got {short(content)}")
        settings = dict(content)
        name = settings.pop("name", None)
        if not isinstance(name, str) or name not in ALGORITHMS:
            raise unknown_name("algorithm", name, ALGORITHMS)
        kind = ALGORITHMS[name]
        refuse_unknown_keys(f"setting of algorithm '{name}'", settings, kind)
        if "target_layer_config" in settings:
            settings["target_layer_config"] = QLayerConfig.from_dict(settings["target_layer_config"])
        return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()})


@dataclass
class CLEConfig(AlgoConfig):
    """Cross-layer equalization. `cle_steps` -1 goes on until the change is below the threshold."""

    name: ClassVar[str] = "cle"
    cle_balance_method: str = "max"
    cle_steps: int = 1
    cle_weight_threshold: float = 0.5
    cle_scale_append_bias: bool = True
    cle_scale_use_threshold: bool = True
    cle_total_layer_diff_threshold: float = 1.9e-7


@dataclass
class SmoothQuantConfig(AlgoConfig):
    """SmoothQuant; `alpha` is the share of the difficulty that moves from activations to weights."""

    name: ClassVar[str] = "smooth_quant"
    alpha: float = 0.5


@dataclass
class BiasCorrectionConfig(AlgoConfig):
    """Biases corrected by the mean error of their layer's output."""

    name: ClassVar[str] = "bias_correction"


@dataclass
class AdaRoundConfig(AlgoConfig):
    """AdaRound: learn for each weight whether it is rounded up or down."""

    name: ClassVar[str] = "adaround"
    optim_device: str = "cpu"
    infer_device: str = "cpu"
    fixed_seed: int = 1705472343
    data_size: int = 1_000_000_000
    batch_size: int = 1
    num_batches: int = 1
    num_iterations: int = 1000
    learning_rate: float | str = 0.1
    early_stop: bool = False
    output_index: int = 0
    lr_adjust: tuple[float, float] | None = None
    target_op_type: tuple[str, ...] | list[str] = TRAINED_OP_TYPES
    selective_update: bool = False
    update_bias: bool = False
    output_qdq: bool = False
    drop_ratio: float = 1.0
    mem_opt_level: int = 1
    cache_dir: str | None = None
    log_period: int = 100
    ref_model_path: str | None = None
    dynamic_batch: bool = False
    parallel: bool = False
    reg_param: float = 0.01
    beta_range: tuple[float, float] = (20, 2)
    warm_start: float = 0.2
    select_max_mem_layer: bool = False
    num_workers: int = 1
    pin_memory: bool = False
    use_gds: bool = False


@dataclass
class AdaQuantConfig(AdaRoundConfig):
    """AdaQuant: learn the weights themselves."""

    name: ClassVar[str] = "adaquant"
    num_iterations: int = 3000
    learning_rate: float | str = 1e-5


@dataclass
class AutoMixprecisionConfig(AlgoConfig):
    """Layers moved one by one, the least sensitive first, to `target_layer_config`, while the metric allows."""

    name: ClassVar[str] = "auto_mixprecision"
    target_layer_config: QLayerConfig | None = None
    target_op_type: tuple[str, ...] | list[str] = ("Conv", "ConvTranspose", "Gemm", "MatMul")
    subgraph_json: str | None = None
    include_layers: tuple[str, ...] | list[str] = ()
    exclude_layers: tuple[str, ...] | list[str] = ()
    data_size: int = 0
    metric_output_index: int = 0
    metric_distance_fn: Callable[..., float] | None = None
    metric_evaluate_fn: Callable[..., float] | None = None
    metric_default: str = "l2"
    metric_threshold: float | None = 0
    metric_optimize_object: str = "speed"
    sensitivity_cache_file: str | PathLike[str] | None = None
    worker_num: int = 1
    dual_quant_nodes: bool = False
    no_input_qdq_shared: bool = False
    shared_param_mode: str = "propagate"


ALGORITHMS: dict[str, type[AlgoConfig]] = {
    cls.name: cls
    for cls in (
        CLEConfig,
        SmoothQuantConfig,
        BiasCorrectionConfig,
        AdaRoundConfig,
        AdaQuantConfig,
        AutoMixprecisionConfig,
    )
}
