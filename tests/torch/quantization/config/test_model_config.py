"""Configurations of layers and models: what they come to, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from quark.decide.specs import AffineSpec, LayerSpec
from quark.errors import InvalidValueError, QuarkError, UnsupportedOptionError, UnsupportedTypeError
from quark.features.bias_correction.options import TorchBiasCorrectionOptions
from quark.features.equalization.options import ClipTreatment, CrossLayerOptions
from quark.features.smooth_quant.options import SmoothOptions
from quark.ranges import MinMax
from quark.torch.quantization.config.algorithm import ALGORITHMS, AlgoConfig
from quark.torch.quantization.config.config import (
    AutoSmoothQuantConfig,
    AWQConfig,
    BiasCorrectionConfig,
    CLEConfig,
    Config,
    GPTQConfig,
    Int8PerChannelSpec,
    Int8PerTensorSpec,
    OCP_MXFP4Spec,
    QuantizationConfig,
    QuantizationSpec,
    SmoothQuantConfig,
    load_quant_algo_config_from_file,
)
from quark.torch.quantization.config.type import (
    Dtype,
    QSchemeType,
    QuantFlow,
    QuantizationMode,
    RoundType,
    ScaleType,
)
from quark.torch.quantization.observer import (
    PerTensorMinMaxObserver,
    PerTensorMSEObserver,
    PerTensorPowOf2MinMaxObserver,
    PerTensorPowOf2MinMSEObserver,
    PerTensorPowOf2NonOverflowObserver,
    TQTObserver,
)


def int8(observer: Any, **fields: Any) -> QuantizationSpec:
    return QuantizationSpec(
        dtype=Dtype.int8,
        qscheme=QSchemeType.per_tensor,
        observer_cls=observer,
        symmetric=True,
        scale_type=ScaleType.float,
        round_method=RoundType.half_even,
        is_dynamic=False,
        **fields,
    )


FLOAT_SCALE, POWER_OF_TWO = int8(PerTensorMinMaxObserver), int8(PerTensorPowOf2MinMaxObserver)
MXFP4 = OCP_MXFP4Spec(ch_axis=None).to_quantization_spec()
CHANNELS = Int8PerChannelSpec(0).to_quantization_spec()
DYNAMIC = QuantizationSpec(Dtype.uint8, is_dynamic=True)


def everywhere(spec: QuantizationSpec) -> QuantizationConfig:
    return QuantizationConfig(spec, spec, spec, spec)


def test_the_documented_config_comes_to_what_it_says() -> None:
    layer = QuantizationConfig(
        input_tensors=FLOAT_SCALE, output_tensors=FLOAT_SCALE, weight=POWER_OF_TWO, bias=POWER_OF_TWO
    )
    settings = Config(global_quant_config=layer, quant_mode=QuantizationMode.fx_graph_mode).settings()
    any_number = AffineSpec("int8", MinMax(), is_symmetric=True)
    power_of_two = AffineSpec("int8", MinMax(), is_symmetric=True, is_power_of_two=True)
    assert settings.specs == LayerSpec(any_number, power_of_two, power_of_two, any_number)
    assert not settings.applies_npu_rules
    assert settings.equalize == CrossLayerOptions(clip=ClipTreatment.CALIBRATED)
    assert settings.correct_biases == TorchBiasCorrectionOptions()
    assert json.loads(json.dumps(settings.config)) == settings.config


@pytest.mark.parametrize("observer", [PerTensorPowOf2MinMaxObserver, PerTensorPowOf2MinMSEObserver, TQTObserver])
def test_npu_rules_come_with_int8_powers_of_two_everywhere(observer: Any) -> None:
    config = everywhere(int8(observer))
    assert Config(config).settings().applies_npu_rules
    assert not Config(config, npu_rules=False).settings().applies_npu_rules
    assert not Config(config, layer_quant_config={"head": everywhere(FLOAT_SCALE)}).settings().applies_npu_rules
    assert not Config(QuantizationConfig(weight=int8(observer))).settings().applies_npu_rules


@pytest.mark.parametrize(
    "layer",
    [
        everywhere(FLOAT_SCALE),
        QuantizationConfig(weight=POWER_OF_TWO),
        QuantizationConfig(POWER_OF_TWO, POWER_OF_TWO, POWER_OF_TWO, QuantizationSpec(Dtype.int32)),
        everywhere(QuantizationSpec(Dtype.int16, PerTensorPowOf2MinMSEObserver)),
        everywhere(MXFP4),
    ],
)
def test_npu_rules_are_refused_where_they_cannot_be_kept(layer: QuantizationConfig) -> None:
    with pytest.raises(InvalidValueError, match="an NPU takes int8, symmetric"):
        Config(layer, npu_rules=True)


def test_algorithms_are_used_where_activations_are_integers_with_known_scales() -> None:
    for layer in (everywhere(MXFP4), QuantizationConfig(weight=CHANNELS), QuantizationConfig(DYNAMIC, weight=CHANNELS)):
        settings = Config(layer).settings()
        assert (settings.equalize, settings.correct_biases) == (None, None)
    settings = Config(QuantizationConfig(FLOAT_SCALE, FLOAT_SCALE, CHANNELS)).settings()
    assert (settings.equalize, settings.correct_biases) == (None, TorchBiasCorrectionOptions())
    settings = Config(everywhere(FLOAT_SCALE), algo_config=[]).settings()
    assert (settings.equalize, settings.correct_biases) == (None, None)
    settings = Config(everywhere(FLOAT_SCALE), algo_config=[CLEConfig(steps=3)]).settings()
    assert (settings.equalize, settings.correct_biases) == (CrossLayerOptions(3, clip=ClipTreatment.CALIBRATED), None)
    settings = Config(everywhere(MXFP4), algo_config=[BiasCorrectionConfig(samples=8)]).settings()
    assert (settings.equalize, settings.correct_biases) == (None, TorchBiasCorrectionOptions(8))


@pytest.mark.parametrize(
    ("weight", "is_compensated"),
    [
        (QuantizationSpec(Dtype.int8, PerTensorPowOf2MinMSEObserver), True),
        (QuantizationSpec(Dtype.int8, PerTensorPowOf2NonOverflowObserver), False),
        (QuantizationSpec(Dtype.int8, TQTObserver), False),
        (QuantizationSpec(Dtype.int8, PerTensorMSEObserver), False),
        (CHANNELS, False),
    ],
    ids=["pof2 mse", "non overflow", "tqt", "float scale", "channels"],
)
def test_weights_of_coarse_fixed_scales_are_compensated(weight: QuantizationSpec, is_compensated: bool) -> None:
    activation = QuantizationSpec(Dtype.int8, PerTensorPowOf2MinMSEObserver)
    found = Config(QuantizationConfig(activation, activation, weight)).settings().options_of("compensation")
    assert (found is not None) == is_compensated
    alone = Config(QuantizationConfig(weight=weight))  # activations stay in float
    assert alone.settings().options_of("compensation") is None
    listed = Config(QuantizationConfig(activation, activation, weight), algo_config=[])
    assert listed.settings().options_of("compensation") is None


def test_smooth_quant_comes_to_its_options() -> None:
    for algorithm, alpha in (
        (SmoothQuantConfig(), 0.5),
        (SmoothQuantConfig(alpha=1), 1.0),
        (AutoSmoothQuantConfig(), None),
    ):
        settings = Config(everywhere(FLOAT_SCALE), algo_config=[CLEConfig(), algorithm]).settings()
        assert settings.options_of("smooth_quant") == SmoothOptions(alpha)
        assert settings.correct_biases is None
        assert AlgoConfig.from_dict(json.loads(json.dumps(algorithm.to_dict()))) == algorithm


def test_algorithms_for_language_models_survive_json() -> None:
    for algorithm, folder in (
        (AWQConfig([{"prev_op": "norm", "layers": ["fc"]}], "h"), "activation_aware"),
        (GPTQConfig(inside_layer_modules=["fc"], damp_percent=0.1), "compensation"),
    ):
        settings = Config(QuantizationConfig(weight=CHANNELS), algo_config=[algorithm]).settings()
        assert settings.options_of(folder) == algorithm.options()
        assert AlgoConfig.from_dict(json.loads(json.dumps(algorithm.to_dict()))) == algorithm
    with pytest.raises(UnsupportedOptionError, match="algorithm 'quarot' is not carried out"):
        AlgoConfig.from_dict({"name": "quarot"})


NAMES: list[Any] = ["cle"]  # in the place of algorithms
AUTO: Any = "auto"
SPECS: dict[str, Any] = {"a": FLOAT_SCALE}  # in the place of configs


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CLEConfig(steps=0), InvalidValueError, "steps 0"),
        (lambda: BiasCorrectionConfig(samples=0), InvalidValueError, "samples 0"),
        (lambda: SmoothQuantConfig(alpha=1.5), InvalidValueError, "alpha 1.5: expected a number from 0 to 1"),
        (lambda: SmoothQuantConfig(alpha=AUTO), InvalidValueError, "AutoSmoothQuantConfig"),
        (lambda: SmoothQuantConfig(scale_clamp_min=2), InvalidValueError, "scale_clamp_min 2"),
        (lambda: SmoothQuantConfig(scaling_layers=[{}]), InvalidValueError, "no prev_op, or no list of layers"),
        (
            lambda: Config(everywhere(FLOAT_SCALE), algo_config=[SmoothQuantConfig(), AutoSmoothQuantConfig()]),
            QuarkError,
            "'autosmoothquant' is listed twice",
        ),
        (lambda: Config(everywhere(FLOAT_SCALE), algo_config=[CLEConfig(), CLEConfig()]), QuarkError, "listed twice"),
        (lambda: Config(everywhere(FLOAT_SCALE), algo_config=NAMES), UnsupportedTypeError, "expected CLEConfig"),
        (lambda: AlgoConfig.from_dict({"name": "cel"}), QuarkError, "Did you mean cle"),
        (lambda: AlgoConfig.from_dict({"name": "cle", "step": 1}), QuarkError, "Did you mean steps"),
        (lambda: Config(FLOAT_SCALE), UnsupportedTypeError, "expected QuantizationConfig"),
        (lambda: Config(everywhere(FLOAT_SCALE), exclude="fc"), UnsupportedTypeError, "expected a list"),
        (lambda: Config(everywhere(FLOAT_SCALE), seed=0.5), UnsupportedTypeError, "seed 0.5"),
        (lambda: Config(everywhere(FLOAT_SCALE), quant_mode="fx"), UnsupportedTypeError, "quant_mode 'fx'"),
        (lambda: Config(everywhere(FLOAT_SCALE), layer_quant_config=SPECS), QuarkError, "'a'"),
        (lambda: Config(everywhere(FLOAT_SCALE), layer_type_quant_config={"conv2D": None}), QuarkError, "Conv2d"),
        (lambda: Config(everywhere(FLOAT_SCALE), layer_type_quant_config={3: None}), QuarkError, "3 came"),
        (lambda: QuantizationConfig(weight=Int8PerTensorSpec()), QuarkError, "to_quantization_spec"),
        (lambda: QuantizationConfig(weight=[FLOAT_SCALE, FLOAT_SCALE]), QuarkError, "2 specs came"),
        (lambda: QuantizationConfig(weight=Dtype.int8), QuarkError, "expected a QuantizationSpec"),
        (lambda: QuantizationConfig(weight=DYNAMIC), InvalidValueError, "known beforehand"),
        (lambda: QuantizationConfig(bias=DYNAMIC), InvalidValueError, "known beforehand"),
        (lambda: QuantizationConfig(input_tensors=CHANNELS), InvalidValueError, "do not add up"),
        (lambda: QuantizationConfig(output_tensors=CHANNELS), InvalidValueError, "do not add up"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_built(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_layers_have_entries_by_class_by_name_and_by_pattern() -> None:
    weight_only = QuantizationConfig(weight=CHANNELS)
    config = Config(
        everywhere(FLOAT_SCALE),
        exclude=["stem.*"],
        layer_type_quant_config={nn.Linear: weight_only, "Conv2d": None},
        layer_quant_config={"head.*": None, "features.0": everywhere(MXFP4)},
        seed=7,
    )
    settings = config.settings()
    assert settings.by_type == {"Linear": weight_only.layer_specs(), "Conv2d": None}
    assert settings.by_name == {"head.*": None, "features.0": everywhere(MXFP4).layer_specs()}
    assert (settings.exclude, settings.seed) == (("stem.*",), 7)


def test_a_config_can_be_edited_and_is_checked_anew() -> None:
    config = Config(everywhere(FLOAT_SCALE))
    config.exclude = ["fc"]
    config.algo_config = []
    assert config.settings().exclude == ("fc",)
    assert config.settings().equalize is None
    config.npu_rules = True
    with pytest.raises(InvalidValueError, match="NPU"):
        config.settings()


def test_json_holds_a_config() -> None:
    configs = [
        Config(everywhere(POWER_OF_TWO)),
        Config(
            QuantizationConfig(DYNAMIC, weight=CHANNELS),
            ["a.*"],
            [CLEConfig(2), BiasCorrectionConfig()],
            layer_type_quant_config={nn.Linear: everywhere(MXFP4), "Conv2d": None},
            layer_quant_config={"b": None},
            npu_rules=False,
            seed=3,
        ),
    ]
    for config in configs:
        read = Config.from_dict(json.loads(json.dumps(config.to_dict())))
        assert read.settings() == config.settings()
        assert read.to_dict() == config.to_dict()
        assert list(read.layer_type_quant_config) in ([], [nn.Linear, nn.Conv2d])
    with pytest.raises(QuarkError, match="Did you mean exclude"):
        Config.from_dict({**configs[0].to_dict(), "exclud": []})
    with pytest.raises(QuarkError, match="Did you mean weight"):
        QuantizationConfig.from_dict({"weights": FLOAT_SCALE.to_dict()})


@pytest.mark.parametrize("name", ALGORITHMS)
def test_json_holds_an_algorithm(name: str) -> None:
    algorithm = ALGORITHMS[name]()
    assert AlgoConfig.from_dict(json.loads(json.dumps(algorithm.to_dict()))) == algorithm


def test_eager_mode_is_taken_with_a_remark(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="quark"):
        eager = Config(everywhere(FLOAT_SCALE), quant_mode=QuantizationMode.eager_mode)
    assert [record.message for record in caplog.records if "on its graph" in record.message] != []
    assert eager.settings().specs == Config(everywhere(FLOAT_SCALE)).settings().specs


def test_fields_of_other_versions_are_read_if_they_change_nothing() -> None:
    """What AMD Quark 0.13 writes, and what its scripts set."""
    layer = everywhere(POWER_OF_TWO)
    content = Config(layer).to_dict()
    weight = content["global_quant_config"]["weight"]
    weight.update(block_size=None, enable_buffer_reuse=False, max_input_numel=4194304)
    content.update(version="0.13", log_severity_level=1, softmax_quant_spec=None, quant_method="quark")
    del content["quant_method"]
    read = Config.from_dict(content)
    assert read.settings() == Config(layer).settings()
    read.keep_prequantized_layers = True
    read.settings()
    for name, value in (("keep_prequantized_layers", False), ("quant_flow", QuantFlow.file2file)):
        with pytest.raises(UnsupportedOptionError, match=name):
            Config(layer, **{name: value})


def test_an_algorithm_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "awq.json"
    path.write_text('{"name": "awq", "scaling_layers": [], "model_decoder_layers": "model.layers"}')
    assert load_quant_algo_config_from_file(path) == AWQConfig(scaling_layers=[], model_decoder_layers="model.layers")
    path.write_text("[]")
    with pytest.raises(InvalidValueError, match="expected the name and the fields"):
        load_quant_algo_config_from_file(path)


def test_the_package_has_the_names_of_the_module() -> None:
    import quark.torch.quantization as package
    from quark.torch.quantization import Int4PerGroupSpec, QConfig, QLayerConfig

    assert (QConfig, QLayerConfig) == (Config, QuantizationConfig)
    assert package.Int4PerGroupSpec is Int4PerGroupSpec
    with pytest.raises(AttributeError, match="no attribute 'Int5PerNothing'"):
        _ = package.Int5PerNothing
