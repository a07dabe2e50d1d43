"""The accuracy algorithms that a QConfig can list, and their settings.

`algorithm_options` turns them into the typed options of the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any, ClassVar

from quark.errors import InvalidValueError, UnsupportedTypeError, refuse_unknown_fields, unknown_name
from quark.features.distillation.options import DistillationOptions
from quark.features.finetuning.options import TRAINED_OP_TYPES
from quark.files.foreign import short
from quark.onnx.quantization.config.content import plain, refuse_function, restored
from quark.onnx.quantization.config.spec import QLayerConfig, refuse_unknown_keys

_WORDS = {"cle": "CLE", "lr": "LR", "qdq": "QDQ", "gds": "GDS", "mse": "MSE"}  # in the names of extra options


@refuse_unknown_fields
@dataclass
class AlgoConfig:
    """An algorithm with its settings."""

    name: ClassVar[str] = ""
    option: ClassVar[str] = ""  # the extra option that has the settings as its keys; empty: each is one by itself

    @classmethod
    def option_keys(cls) -> dict[str, str]:
        """The names of extra options, or of keys of `option`, by setting.

        >>> CLEConfig.option_keys()["cle_steps"], AdaRoundConfig.option_keys()["output_qdq"]
        ('CLESteps', 'OutputQDQ')
        """
        names = [field.name for field in fields(cls)]
        return {name: "".join(_WORDS.get(part, part.capitalize()) for part in name.split("_")) for name in names}

    def get_options(self) -> dict[str, Any]:
        """The settings as extra options, those at their defaults too.

        >>> SmoothQuantConfig(alpha=0.7).get_options()
        {'SmoothAlpha': 0.7}
        """
        return self._get_config({})

    def _get_config(self, extra_options: dict[str, Any]) -> dict[str, Any]:
        """The extra options without those that are given already."""
        given = extra_options.get(self.option, {}) if self.option else extra_options
        values = {key: getattr(self, name) for name, key in self.option_keys().items() if key not in given}
        return {self.option: values} if self.option else values

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
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}
        if "target_layer_config" in settings:
            values["target_layer_config"] = _target_layers(settings["target_layer_config"])
        return kind(**values)


def _target_layers(content: Any) -> Any:
    """The config, the list or the dictionary of configs that `to_dict` wrote."""
    if not isinstance(content, list):
        return QLayerConfig.from_dict(content)
    if all(isinstance(entry, list) for entry in content):
        return {QLayerConfig.from_dict(config): list(names) for config, names in content}
    return [QLayerConfig.from_dict(entry) for entry in content]


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

    @classmethod
    def option_keys(cls) -> dict[str, str]:
        """The names of extra options, by setting."""
        return {"alpha": "SmoothAlpha"}


@dataclass
class BiasCorrectionConfig(AlgoConfig):
    """Biases corrected by the mean error of their layer's output."""

    name: ClassVar[str] = "bias_correction"

    def _get_config(self, extra_options: dict[str, Any]) -> dict[str, Any]:
        return {} if "BiasCorrection" in extra_options else {"BiasCorrection": True}


@dataclass
class AdaRoundConfig(AlgoConfig):
    """AdaRound: learn for each weight whether it is rounded up or down."""

    name: ClassVar[str] = "adaround"
    option: ClassVar[str] = "FastFinetune"
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

    def _get_config(self, extra_options: dict[str, Any]) -> dict[str, Any]:
        options = super()._get_config(extra_options)
        if "OptimAlgorithm" not in extra_options.get(self.option, {}):
            options[self.option]["OptimAlgorithm"] = self.name
        return options


@dataclass
class AdaQuantConfig(AdaRoundConfig):
    """AdaQuant: learn the weights themselves."""

    name: ClassVar[str] = "adaquant"
    num_iterations: int = 3000
    learning_rate: float | str = 1e-5


@dataclass
class AutoMixprecisionConfig(AlgoConfig):
    """Layers moved one by one, the least sensitive first, to `target_layer_config`, while the metric allows.

    `target_layer_config` is one config, a list of which each layer gets the best, or a dictionary from configs to names
    of layers, with an empty list for all others. The fields from `act_target_quant_type` on are those of releases
    before 0.13, which named types and limits in this way.
    """

    name: ClassVar[str] = "auto_mixprecision"
    option: ClassVar[str] = "AutoMixprecision"
    target_layer_config: QLayerConfig | dict[QLayerConfig, list[str]] | list[QLayerConfig] | None = None
    target_op_type: tuple[str, ...] | list[str] = ("Conv", "ConvTranspose", "Gemm", "MatMul")
    subgraph_json: str | PathLike[str] | None = None
    include_layers: tuple[str, ...] | list[str] | None = ()
    exclude_layers: tuple[str, ...] | list[str] | None = ()
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
    act_target_quant_type: Any = None
    weight_target_quant_type: Any = None
    bias_target_quant_type: Any = None
    target_quant_type: Any = None
    output_index: int | None = None
    l2_target: float | None = None
    top1_acc_target: float | None = None
    evaluate_function: Callable[..., Any] | None = None
    num_target: int = 0
    target_tensors: tuple[str, ...] | list[str] = ()
    target_indices: tuple[int, ...] | list[int] = ()
    exclude_indices: tuple[int, ...] | list[int] = ()

    def __post_init__(self) -> None:
        choices = {"metric_optimize_object": ("speed", "quality"), "shared_param_mode": ("propagate", "unshare")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise InvalidValueError(f"{name} is {getattr(self, name)!r}: expected {' or '.join(known)}")
        for name in (field.name for field in fields(self) if field.name.endswith("target_quant_type")):
            value = getattr(self, name)  # a data type in a script, the name of a quant type in a file
            setattr(self, name, restored(getattr(value, "map_onnx_format", value)))

    def to_dict(self, on_function: Callable[[str], Any] = refuse_function) -> dict[str, Any]:
        """Like that of other algorithms; configs by layer become pairs of a config and names."""
        target = self.target_layer_config
        if not isinstance(target, dict):
            return super().to_dict(on_function)
        content = replace(self, target_layer_config=None).to_dict(on_function)
        return {**content, "target_layer_config": [[config.to_dict(), list(names)] for config, names in target.items()]}


@dataclass
class GPTQConfig(AlgoConfig):
    """GPTQ: weights rounded one column after the other, each making up for the error of those before it.

    Weights are rounded to the scales of their spec, so `bits` must be that of the weight's type if it is given, and
    `group_size`, `per_channel`, `mse` and `weight_symmetric` are settings of the spec.
    """

    name: ClassVar[str] = "gptq"
    option: ClassVar[str] = "GPTQParams"
    bits: int = 8
    block_size: int = 128
    group_size: int = -1
    perc_damp: float = 0.01
    act_order: bool = False
    per_channel: bool = False
    mse: bool = False
    weight_symmetric: bool = True

    def _get_config(self, extra_options: dict[str, Any]) -> dict[str, Any]:
        return {"UseGPTQ": True, **super()._get_config(extra_options)}


@dataclass
class QuarotConfig(AlgoConfig):
    """QuaRot: activations rotated by a Hadamard matrix, which spreads their outliers over all channels.

    `r_config_path` is a JSON file that names the nodes before and behind each rotated tensor; without it, residual
    streams are found in the graph. `r1` to `r4` say what is rotated (docs/rotation.md); `r2` None: with `r1`, unless
    there is a file. With `rotation_size`, blocks of so many channels are rotated by themselves.
    """

    name: ClassVar[str] = "quarot"
    r_matrix_dim: int = 4096
    use_random_had: bool = False
    r_config_path: str | None = None
    r1: bool = True
    r2: bool | None = None
    r3: bool = False
    r4: bool = False
    rotation_size: int | None = None
    online_r1_rotation: bool = False


@dataclass
class DistillationConfig(AlgoConfig):
    """Distillation: all weights trained together, with quantizers, to give the float network's outputs.

    `rate` is a share of what rounding changes weights by. docs/finetuning.md has the other settings.

    >>> DistillationConfig(steps=100).get_options()["DistillationSteps"]
    100
    """

    name: ClassVar[str] = "distillation"
    steps: int = DistillationOptions.steps
    samples: int = DistillationOptions.sample_limit
    batch: int = DistillationOptions.batch_size
    rate: float = DistillationOptions.rate_share
    features: float = DistillationOptions.feature_weight
    mixing: float = DistillationOptions.mixed_share
    unrounded: float = DistillationOptions.unrounded_share
    augmentation: str = DistillationOptions.augmentation
    device: str = DistillationOptions.device
    seed: int = DistillationOptions.seed
    folder: str = DistillationOptions.folder

    @classmethod
    def option_keys(cls) -> dict[str, str]:
        """The names of extra options, by setting."""
        return {field.name: f"Distillation{field.name.capitalize()}" for field in fields(cls)}

    def _get_config(self, extra_options: dict[str, Any]) -> dict[str, Any]:
        return {"Distillation": True, **super()._get_config(extra_options)}


ALGORITHMS: dict[str, type[AlgoConfig]] = {
    cls.name: cls
    for cls in (
        CLEConfig,
        SmoothQuantConfig,
        BiasCorrectionConfig,
        AdaRoundConfig,
        AdaQuantConfig,
        AutoMixprecisionConfig,
        GPTQConfig,
        QuarotConfig,
        DistillationConfig,
    )
}
ALGO_NAME_TO_CLASS = ALGORITHMS  # its name in AMD Quark
