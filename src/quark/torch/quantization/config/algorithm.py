"""The accuracy algorithms that a Config can list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

from quark.errors import (
    InvalidValueError,
    UnsupportedOptionError,
    UnsupportedTypeError,
    refuse_unknown_fields,
    unknown_name,
)
from quark.features.activation_aware.options import LanguageScalingOptions
from quark.features.bias_correction.options import TorchBiasCorrectionOptions
from quark.features.compensation.options import LanguageCompensationOptions
from quark.features.equalization.options import ClipTreatment, CrossLayerOptions
from quark.features.feature import Feature
from quark.features.low_rank.options import LowRankOptions
from quark.features.order import FEATURES
from quark.features.rotation.options import LanguageRotationOptions, NormGroup
from quark.features.sign_rounding.options import SignRoundingOptions
from quark.features.smooth_quant.options import SmoothOptions
from quark.text import get_logger
from quark.torch.language.named_groups import NamedGroup

_LOG = get_logger(__name__)


@refuse_unknown_fields
@dataclass
class AlgoConfig:
    """An algorithm with its settings. Each has a field `name`, which says what it is in files. Fields can be edited;
    they are checked when it is built and when it is used."""

    feature: ClassVar[str] = ""  # its folder, see features/order.py

    def to_dict(self) -> dict[str, Any]:
        """Its name and settings, as JSON can hold them."""
        settings = asdict(self)
        return {"name": settings.pop("name"), **settings}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AlgoConfig:
        """Read what `to_dict` wrote; missing settings have their defaults, and a missing name is that of the class."""
        settings = dict(data)
        name = settings.pop("name", getattr(cls, "name", None))
        if name in _REFUSED:
            raise UnsupportedOptionError(f"algorithm '{name}' is not carried out on torch models: {_REFUSED[name]}")
        algorithms = {**ALGORITHMS, **{feature.folder: feature.options for feature in FEATURES if feature.switch}}
        if name not in algorithms:
            raise unknown_name("algorithm", name, algorithms)
        known = [field.name for field in fields(algorithms[name])]
        for key in settings:
            if key not in known:
                raise unknown_name(f"setting of algorithm '{name}'", key, known)
        return algorithms[name](**settings)  # type: ignore[no-any-return]


@refuse_unknown_fields
@dataclass
class CLEConfig(AlgoConfig):
    """Cross-layer equalization: `steps` sweeps over all pairs of layers; -1: until they settle."""

    name: str = field(default="cle", kw_only=True)
    feature: ClassVar[str] = "equalization"
    steps: int = CrossLayerOptions.steps

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> CrossLayerOptions:
        steps = self.steps
        if isinstance(steps, bool) or not isinstance(steps, int) or (steps < 1 and steps != -1):
            raise InvalidValueError(f"steps {steps!r}: expected 1 or more, or -1 to go on until they settle")
        return CrossLayerOptions(steps, clip=ClipTreatment.CALIBRATED)


@refuse_unknown_fields
@dataclass
class BiasCorrectionConfig(AlgoConfig):
    """Biases corrected by the mean error of their layer's output, over at most that many `samples`."""

    name: str = field(default="bias_correction", kw_only=True)
    feature: ClassVar[str] = "bias_correction"
    samples: int = TorchBiasCorrectionOptions.samples

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> TorchBiasCorrectionOptions:
        return TorchBiasCorrectionOptions(self.samples)


@refuse_unknown_fields
@dataclass
class SmoothQuantConfig(AlgoConfig):
    """SmoothQuant; `alpha`, from 0 to 1, is the share of the difficulty that moves from activations to weights.

    Layers, and what computes their inputs, are found. For language models they can also be named: `scaling_layers` has
    dictionaries with prev_op, layers, inp and module2inspect, paths in a decoder layer, and `model_decoder_layers` is
    the path of the list of layers. No scale is smaller than `scale_clamp_min` there. On other models these three are
    accepted with their defaults only.
    """

    name: str = field(default="smooth", kw_only=True)
    feature: ClassVar[str] = "smooth_quant"
    alpha: float = 0.5
    scale_clamp_min: float = SmoothOptions.least_scale
    scaling_layers: Any = None
    model_decoder_layers: str = ""

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> SmoothOptions:
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha <= 1:
            raise InvalidValueError(
                f"alpha {self.alpha!r}: expected a number from 0 to 1; AutoSmoothQuantConfig searches for the best one"
            )
        least = _number(self, "scale_clamp_min", 0, 1)
        return SmoothOptions(float(self.alpha), least, *_structure(self))


@refuse_unknown_fields
@dataclass
class AutoSmoothQuantConfig(AlgoConfig):
    """SmoothQuant with the best alpha for each group of layers that share their input: that of the least estimated
    error, for language models that of the least error of outputs, squared (`compute_scale_loss` MSE), absolute (MAE)
    or the square root of that (RMSE). Other fields are those of SmoothQuantConfig."""

    name: str = field(default="autosmoothquant", kw_only=True)
    feature: ClassVar[str] = "smooth_quant"
    scaling_layers: Any = None
    model_decoder_layers: str | None = ""
    compute_scale_loss: str | None = "MSE"

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> SmoothOptions:
        powers = {"MSE": 2.0, "MAE": 1.0, "RMSE": 0.5}
        loss = self.compute_scale_loss or "MSE"
        if loss not in powers:
            raise unknown_name("compute_scale_loss", loss, powers)
        groups, layers = _structure(self)
        return SmoothOptions(None, groups=groups, decoder_layers=layers, error_power=powers[loss])


@refuse_unknown_fields
@dataclass
class AWQConfig(AlgoConfig):
    """AWQ for language models: weights of large inputs are scaled up before they are rounded, and scales of weights are
    searched. `scaling_layers` and `model_decoder_layers` are those of SmoothQuantConfig; what they leave out is found.
    """

    name: str = field(default="awq", kw_only=True)
    feature: ClassVar[str] = "activation_aware"
    scaling_layers: Any = None
    model_decoder_layers: str = ""

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> LanguageScalingOptions:
        groups, layers = _structure(self)
        return LanguageScalingOptions(groups=groups, decoder_layers=layers)


@refuse_unknown_fields
@dataclass
class GPTQConfig(AlgoConfig):
    """GPTQ for language models: weights make up for each other's rounding, by how the inputs of their layer vary
    together, and for what the quantized layers before have changed in these inputs. Without the latter, which is not in
    the paper, the perplexity of SmolLM2 in int4 rose by 17 % instead of 5 %.

    Bits, groups and formats are those of the weight's spec. `block_size` columns are rounded before others are updated.
    `damp_percent` of the mean of the Gram matrix's diagonal is added to it, or 8 or 64 times that, if weights that were
    fitted to seven eighths of the batches then do better on the last eighth. `desc_act`: columns of large inputs come
    first. Without `static_groups` the scale of a group is found when its turn comes. `inside_layer_modules` are paths
    in a decoder layer, all linear layers if empty; `model_decoder_layers` is the path of the list of layers, which is
    found if it is empty.

    Networks that are quantized on their graph take it as well, for convolutions and linear layers whose weights have
    scales of least squared error, or blocks: there the inputs are those of the float network, `damp_percent` and
    `desc_act` are used, and modules cannot be named.
    """

    name: str = field(default="gptq", kw_only=True)
    feature: ClassVar[str] = "compensation"
    block_size: int = 128
    damp_percent: float = 0.01
    desc_act: bool = True
    static_groups: bool = True
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> LanguageCompensationOptions:
        damping = _number(self, "damp_percent", 0, 1, is_open=True)
        return _compensation(self, damping=damping, float_share=1.0)


@refuse_unknown_fields
@dataclass
class GPTAQConfig(AlgoConfig):
    """GPTAQ for language models: GPTQ that makes up for a share, `alpha`, of what the quantized layers before have
    changed in the inputs; GPTQConfig does for all of it. Other fields are those of GPTQConfig."""

    name: str = field(default="gptaq", kw_only=True)
    feature: ClassVar[str] = "compensation"
    block_size: int = 128
    damp_percent: float = 0.01
    alpha: float = 0.25
    desc_act: bool = True
    static_groups: bool = True
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> LanguageCompensationOptions:
        damping = _number(self, "damp_percent", 0, 1, is_open=True)
        return _compensation(self, damping=damping, float_share=_number(self, "alpha", 0, 1, is_open=True))


@refuse_unknown_fields
@dataclass
class QronosConfig(AlgoConfig):
    """Qronos for language models: weights are first moved to those that give, for the inputs that the quantized layers
    before leave, what the float network has; then they are rounded as in GPTQ.

    `alpha` of the Gram matrix's largest eigenvalue is added to its diagonal. `beta` keeps a float32 factorization
    stable; the one here is in float64 and does not need it. Other fields are those of GPTQConfig.
    """

    feature: ClassVar[str] = "compensation"
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""
    name: str = field(default="qronos", kw_only=True)
    block_size: int = 128
    desc_act: bool = True
    static_groups: bool = True
    alpha: float = 1e-3
    beta: float = 1e4

    def __post_init__(self) -> None:
        self.options()
        if self.beta != QronosConfig.beta:
            _LOG.warning("beta of algorithm 'qronos' changes nothing: matrices are factorized in float64")

    def options(self) -> LanguageCompensationOptions:
        _number(self, "beta", 0, float("inf"), is_open=True)
        damping = _number(self, "alpha", 0, 1, is_open=True)
        return _compensation(self, damping=damping, float_share=1.0, is_damping_of_largest=True)


@refuse_unknown_fields
@dataclass
class SearchedScalesConfig(AlgoConfig):
    """Rounding to nearest for language models with the scales of channels and groups that give the least error of
    outputs on the calibration data. Fields are those of GPTQConfig."""

    name: str = field(default="searched_scales", kw_only=True)
    feature: ClassVar[str] = "compensation"
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> LanguageCompensationOptions:
        modules, layers = _modules(self)
        return LanguageCompensationOptions(has_compensation=False, modules=modules, decoder_layers=layers)


@refuse_unknown_fields
@dataclass
class AutoRoundConfig(AlgoConfig):
    """AutoRound for language models: rounding is learned, layer by layer, by `iters` steps of signed gradient descent.

    `lr` is the rate of the rounding offsets, `minmax_lr` that of clipped ranges, which `enable_minmax_tuning` turns on;
    both fall to zero. A step uses `batch_size` batches of the data. `inside_layer_modules` and `model_decoder_layers`
    are those of GPTQConfig.
    """

    name: str = field(default="autoround", kw_only=True)
    feature: ClassVar[str] = "sign_rounding"
    iters: int = 200
    lr: float = 1 / 200
    enable_minmax_tuning: bool = True
    minmax_lr: float = 1 / 200
    batch_size: int = 8
    inside_layer_modules: list[str] = field(default_factory=list)
    model_decoder_layers: str = ""

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> SignRoundingOptions:
        return SignRoundingOptions(
            _count(self, "iters"),
            _number(self, "lr", 0, 1, is_open=True),
            bool(self.enable_minmax_tuning),
            _number(self, "minmax_lr", 0, 1, is_open=True),
            _count(self, "batch_size"),
            *_modules(self),
        )


@refuse_unknown_fields
@dataclass
class SVDQuantConfig(AlgoConfig):
    """SVDQuant for language models: the `svd_rank` largest directions of a weight stay in float, the rest is rounded.

    Directions are those of the weight after smoothing with `smooth_alpha`, or, with `search_alpha`, with the best of
    `alpha_candidates` (None: 0.05 to 0.95) on the first `alpha_search_max_samples` batches. Layers that match a pattern
    of `exclude_patterns`, or have fewer than `min_layer_size` inputs or outputs, are rounded without. `use_gptq` rounds
    the rest by GPTQ with `gptq_blocksize`, `gptq_percdamp` and `gptq_actorder`. Its bits, symmetry and groups are those
    of the weight's spec: `gptq_n_bits`, `gptq_symmetric` and `gptq_group_size` are accepted with their defaults only.
    """

    name: str = field(default="svdquant", kw_only=True)
    feature: ClassVar[str] = "low_rank"
    svd_rank: int = 32
    smooth_alpha: float = 0.5
    search_alpha: bool = True
    alpha_candidates: list[float] | None = None
    alpha_search_max_samples: int = 8
    exclude_patterns: list[str] = field(
        default_factory=lambda: ["time_embedding", "add_time_proj", "conv_in", "conv_out", "time_proj"]
    )
    min_layer_size: int = 256
    use_gptq: bool = False
    gptq_n_bits: int = 4
    gptq_symmetric: bool = True
    gptq_group_size: int = -1
    gptq_blocksize: int = 128
    gptq_percdamp: float = 0.01
    gptq_actorder: bool = False

    def __post_init__(self) -> None:
        self.options()

    def options(self) -> LowRankOptions:
        for name in ("gptq_n_bits", "gptq_symmetric", "gptq_group_size"):
            if getattr(self, name) != getattr(SVDQuantConfig, name):
                raise UnsupportedOptionError(
                    f"{name} of algorithm 'svdquant': the weight's spec says bits, symmetry and groups; leave it out"
                )
        candidates = self.alpha_candidates
        if candidates is not None and not (candidates and all(_is_number(candidate, 0, 1) for candidate in candidates)):
            raise InvalidValueError(f"alpha_candidates {candidates!r}: expected a list of numbers from 0 to 1")
        tried = LowRankOptions.alphas if candidates is None else tuple(candidates)
        return LowRankOptions(
            _count(self, "svd_rank"),
            _number(self, "smooth_alpha", 0, 1),
            tried if self.search_alpha else (),
            _count(self, "alpha_search_max_samples"),
            _strings(self, "exclude_patterns"),
            _count(self, "min_layer_size", least=0),
            bool(self.use_gptq),
            _count(self, "gptq_blocksize"),
            _number(self, "gptq_percdamp", 0, 1, is_open=True),
            bool(self.gptq_actorder),
        )


def _compensation(config: GPTQConfig | GPTAQConfig | QronosConfig, **own: Any) -> LanguageCompensationOptions:
    if config.desc_act and not config.static_groups:
        raise InvalidValueError(
            f"desc_act with static_groups=False of algorithm '{config.name}': columns of a group are rounded at "
            "different times, and it has one scale; use static_groups=True, or desc_act=False"
        )
    modules, layers = _modules(config)
    return LanguageCompensationOptions(
        has_activation_order=bool(config.desc_act),
        block_size=_count(config, "block_size"),
        has_static_groups=bool(config.static_groups),
        modules=modules,
        decoder_layers=layers,
        **own,
    )


def _modules(config: Any) -> tuple[tuple[str, ...], str]:
    """The names of modules in a layer, and the path of the list of layers."""
    layers = config.model_decoder_layers or ""
    if not isinstance(layers, str):
        raise UnsupportedTypeError(f"model_decoder_layers {layers!r}: expected a path, such as 'model.layers'")
    return _strings(config, "inside_layer_modules"), layers


_GROUP_FIELDS = ("prev_op", "layers", "inp", "module2inspect")


def _structure(config: Any) -> tuple[tuple[NamedGroup, ...], str]:
    """`scaling_layers` as groups, and the path of the list of layers."""
    groups = []
    for entry in config.scaling_layers or ():
        if not isinstance(entry, Mapping):
            raise UnsupportedTypeError(
                f"scaling_layers of algorithm '{config.name}': expected dictionaries, got {entry!r}"
            )
        for key in entry:
            if key not in _GROUP_FIELDS:
                raise unknown_name(f"field of scaling_layers of algorithm '{config.name}'", key, _GROUP_FIELDS)
        linears = entry.get("layers")
        if not isinstance(entry.get("prev_op"), str) or not isinstance(linears, (list, tuple)) or not linears:
            raise InvalidValueError(
                f"scaling_layers of algorithm '{config.name}': {dict(entry)!r} has no prev_op, or no list of layers"
            )
        inspected = entry.get("module2inspect") or ""
        groups.append(NamedGroup(entry["prev_op"], tuple(linears), entry.get("inp") or linears[0], inspected))
    layers = config.model_decoder_layers or ""
    if not isinstance(layers, str):
        raise UnsupportedTypeError(f"model_decoder_layers {layers!r}: expected a path, such as 'model.layers'")
    return tuple(groups), layers


def _strings(config: Any, name: str) -> tuple[str, ...]:
    value = getattr(config, name)
    if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
        raise UnsupportedTypeError(f"{name} {value!r} of algorithm '{config.name}': expected a list of names")
    return tuple(value)


def _is_number(value: Any, lowest: float, highest: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and lowest <= value <= highest


def _number(config: Any, name: str, lowest: float, highest: float, *, is_open: bool = False) -> float:
    """A field as a number within bounds; where `is_open`, the lower bound is not one of them."""
    value = getattr(config, name)
    if not _is_number(value, lowest, highest) or (is_open and value == lowest):
        words = f"above {lowest:g}, up to {highest:g}" if is_open else f"from {lowest:g} to {highest:g}"
        raise InvalidValueError(f"{name} {value!r} of algorithm '{config.name}': expected a number {words}")
    return float(value)


def _count(config: Any, name: str, least: int = 1) -> int:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidValueError(f"{name} {value!r} of algorithm '{config.name}': expected an integer from {least} on")
    return value


@refuse_unknown_fields
@dataclass
class OnlineRotationConfig:
    """Settings of rotations at inference. All layers of one size have the same Hadamard matrix, so `shared_parallel`
    makes no difference; the layers are found, so `online_rotation_layers` is not needed."""

    shared_parallel: bool = False
    online_rotation_layers: list[str] | None = None
    use_input_prescale: bool = False


@refuse_unknown_fields
@dataclass
class RotationConfig(AlgoConfig):
    """QuaRot and SpinQuant's rotations of a language model, without training (docs/rotation.md).

    `r1` rotates the hidden states between layers, `r2` the values of attention, `r3` queries and keys, `r4` the inputs
    of down projections. With `online_r1_rotation`, r1 rotates the inputs of linear layers at inference instead of being
    folded. With `rotation_size`, r1 and r4 rotate blocks of so many channels by themselves. `scaling_layers`, `v_proj`
    and `o_proj` name modules; what they leave out is found in the model.
    """

    feature: ClassVar[str] = "rotation"
    scaling_layers: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    name: str = field(default="rotation", kw_only=True)
    r1: bool = True
    r2: bool = False
    r3: bool = False
    r4: bool = False
    rotation_size: int | None = None
    random_r1: bool = False
    random_r2: bool = False
    backbone: str = "model"
    model_decoder_layers: str = "model.layers"
    v_proj: str = "self_attn.v_proj"
    o_proj: str = "self_attn.o_proj"
    self_attn: str = "self_attn"
    mlp: str = "mlp"
    online_r1_rotation: bool | None = None
    online_config: OnlineRotationConfig | Mapping[str, Any] | None = None
    trainable: bool = False
    train_smooth: bool | None = None
    smooth_positions: list[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.online_config, Mapping):
            self.online_config = OnlineRotationConfig(**self.online_config)
        self.options()

    def options(self) -> LanguageRotationOptions:
        if not self.r1 and self.online_r1_rotation is not None:
            raise InvalidValueError("online_r1_rotation of algorithm 'rotation': r1 is False; leave one of them out")
        for name in ("trainable", "train_smooth", "smooth_positions"):
            if getattr(self, name):
                raise UnsupportedOptionError(
                    f"{name} of algorithm 'rotation': rotations are Hadamard matrices and are not trained; leave it out"
                )
        if isinstance(self.online_config, OnlineRotationConfig) and self.online_config.use_input_prescale:
            raise UnsupportedOptionError("use_input_prescale of algorithm 'rotation': use AWQConfig beside it instead")
        usual = {field.name: field.default for field in fields(self)}
        named = {name: value for name in _MODULE_FIELDS if (value := getattr(self, name)) != usual[name]}
        has_projections = "v_proj" in named or "o_proj" in named
        return LanguageRotationOptions(
            *(self.r1, self.r2, self.r3, self.r4),
            block=self.rotation_size,
            is_online=bool(self.online_r1_rotation),
            is_random=self.random_r1,
            is_random_r2=self.random_r2,
            **_norm_groups(self.scaling_layers),
            backbone=named.get("backbone", ""),
            layers=named.get("model_decoder_layers", ""),
            values=self.v_proj if has_projections else "",
            outputs=self.o_proj if has_projections else "",
            attention=named.get("self_attn", ""),
            feed_forward=named.get("mlp", ""),
        )


_MODULE_FIELDS = ("backbone", "model_decoder_layers", "v_proj", "o_proj", "self_attn", "mlp")
_LAYER_GROUPS = {"first_layer": "first", "middle_layers": "middle", "last_layer": "last"}
_GROUP_KEYS = {"prev_modules": "writers", "norm_module": "norm", "next_modules": "readers", "target_modules": "targets"}


def _norm_groups(layers: Any) -> dict[str, Any]:
    """`scaling_layers` of RotationConfig as the groups of the first layer, of the others, and behind the last."""
    if layers is None:
        return {}
    if not isinstance(layers, Mapping) or not all(isinstance(entries, Sequence) for entries in layers.values()):
        raise InvalidValueError(
            f"scaling_layers of algorithm 'rotation': expected lists by {', '.join(_LAYER_GROUPS)}, got {layers!r}"
        )
    options: dict[str, Any] = {}
    for key, entries in layers.items():
        if key not in _LAYER_GROUPS:
            raise unknown_name("group of scaling_layers", key, _LAYER_GROUPS)
        groups = []
        for entry in entries:
            unknown = next((name for name in entry if name not in _GROUP_KEYS), None)
            if unknown is not None:
                raise unknown_name(f"field of scaling_layers['{key}']", unknown, _GROUP_KEYS)
            named: dict[str, Any] = {
                _GROUP_KEYS[name]: value if isinstance(value, str) else tuple(value) for name, value in entry.items()
            }
            groups.append(NormGroup(**named))
        options[_LAYER_GROUPS[key]] = tuple(groups)
    return options


_OWN = (
    CLEConfig,
    BiasCorrectionConfig,
    SmoothQuantConfig,
    AutoSmoothQuantConfig,
    RotationConfig,
    AWQConfig,
    GPTQConfig,
    GPTAQConfig,
    QronosConfig,
    SearchedScalesConfig,
    AutoRoundConfig,
    SVDQuantConfig,
)
ALGORITHMS: Mapping[str, type[AlgoConfig]] = {getattr(cls, "name", ""): cls for cls in _OWN}
_REFUSED = {"quarot": "use RotationConfig (name 'rotation'), for language models"}


def algorithm_dict(algorithm: Any) -> dict[str, Any]:
    """An entry of `algo_config` as JSON can hold it."""
    if isinstance(algorithm, AlgoConfig):
        return algorithm.to_dict()
    return {"name": _feature_of(algorithm).folder, **asdict(algorithm)}


def _feature_of(options: Any) -> Feature:
    """The feature of features/order.py that these are the options of."""
    feature = next((feature for feature in FEATURES if feature.switch and type(options) is feature.options), None)
    if feature is None:
        raise UnsupportedTypeError(
            f"algo_config {options!r}: expected CLEConfig, BiasCorrectionConfig, SmoothQuantConfig, "
            "GPTQConfig or another one of quark.torch.quantization.config"
        )
    return feature


ChosenOptions: TypeAlias = tuple[CrossLayerOptions | None, TorchBiasCorrectionOptions | None, dict[str, Any]]


def chosen_options(algorithms: Sequence[Any]) -> ChosenOptions:
    """The options of equalization, of bias correction, and of the features of features/order.py that are listed."""
    if not isinstance(algorithms, Sequence):
        raise UnsupportedTypeError(f"algo_config {algorithms!r}: expected a list, such as [CLEConfig()]; [] is none")
    options: dict[str, Any] = {}
    for algorithm in algorithms:
        is_own = isinstance(algorithm, _OWN)
        if is_own and algorithm.name != type(algorithm).name:
            kind = type(algorithm)
            raise InvalidValueError(f"name {algorithm.name!r} of {kind.__name__}: expected {kind.name!r}")
        feature = algorithm.feature if is_own else _feature_of(algorithm).folder
        if feature in options:
            raise UnsupportedOptionError(
                f"algorithm '{algorithm.name if is_own else feature}' is listed twice: keep one of the two"
            )
        options[feature] = algorithm.options() if is_own else algorithm
    return options.pop(CLEConfig.feature, None), options.pop(BiasCorrectionConfig.feature, None), options
