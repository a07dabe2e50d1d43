"""FastFinetune, AdaRoundConfig, AdaQuantConfig: every setting is carried out, refused with a reason, or remarked on."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from mixed_networks import images, mixed_network

from quark import devices
from quark.errors import (
    InvalidValueError,
    MissingDependencyError,
    UnknownNameError,
    UnsupportedTypeError,
)
from quark.features.finetuning.options import (
    ROWS_OF_A_SAMPLE,
    TRAINED_OP_TYPES,
    Algorithm,
    FinetuneOptions,
    FitOptions,
    Reconstruction,
)
from quark.onnx import ModelQuantizer, QConfig, QuantizationConfig, get_default_config, quantize
from quark.onnx.quantization.config.algorithm import AdaQuantConfig, AdaRoundConfig, BiasCorrectionConfig
from quark.onnx.quantization.config.finetune_options import FINETUNE_KEYS, NO_LIMIT
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.config.spec import Int8Spec, QLayerConfig
from quark.onnx.quantization.data import Data

INT8 = QLayerConfig(activation=Int8Spec(), weight=Int8Spec())
MEGABYTE = 1 << 20


def finetuned(**settings) -> QuantizationConfig:
    return QuantizationConfig(include_fast_ft=True, print_summary=False, extra_options={"FastFinetune": settings})


def options_of(**settings) -> FinetuneOptions:
    options = settings_of(finetuned(**settings)).refine.finetune
    assert options is not None
    return options


# Key, value, field of the fit or of the run, its value there.
FIT = [
    ("FixedSeed", 7, "seed", 7),
    ("FixedSeed", 0, "seed", 0),
    ("BatchSize", 1, "batch_rows", ROWS_OF_A_SAMPLE),
    ("BatchSize", 3, "batch_rows", 3 * ROWS_OF_A_SAMPLE),
    ("NumBatches", 5, "batches", 5),
    ("NumBatches", 0, "batches", -1),
    ("NumBatches", -4, "batches", -1),
    ("NumIterations", 0, "iterations", 0),
    ("NumIterations", 20, "iterations", 20),
    ("LearningRate", 0.2, "learning_rate", 0.2),
    ("LearningRate", 1, "learning_rate", 1.0),
    ("LearningRate", "auto", "learning_rate", None),
    ("OptimAlgorithm", "adaround", "algorithm", Algorithm.ADAROUND),
    ("OptimAlgorithm", "AdaQuant", "algorithm", Algorithm.ADAQUANT),
    ("OptimAlgorithm", "ADAQUANT", "algorithm", Algorithm.ADAQUANT),
    ("OptimDevice", "cpu", "device", "cpu"),
    ("EarlyStop", True, "has_early_stop", True),
    ("EarlyStop", False, "has_early_stop", False),
    ("LRAdjust", (0.5, 0.01), "lr_adjust", (0.5, 0.01)),
    ("LRAdjust", [1, 2], "lr_adjust", (1.0, 2.0)),
    ("LRAdjust", None, "lr_adjust", None),
    ("UpdateBias", True, "has_bias", True),
    ("UpdateBias", False, "has_bias", False),
    ("OutputQDQ", True, "has_output_rounding", True),
    ("OutputQDQ", False, "has_output_rounding", False),
    ("DropRatio", 0, "drop_ratio", 0.0),
    ("DropRatio", 0.5, "drop_ratio", 0.5),
    ("LogPeriod", 10, "log_period", 10),
    ("LogPeriod", 1, "log_period", 1),
    ("RegParam", 0, "regularization", 0.0),
    ("RegParam", 0.1, "regularization", 0.1),
    ("BetaRange", [10, 2], "beta_range", (10.0, 2.0)),
    ("BetaRange", (8, 1), "beta_range", (8.0, 1.0)),
    ("WarmStart", 0, "warm_start", 0.0),
    ("WarmStart", 0.5, "warm_start", 0.5),
]
RUN = [
    ("DataSize", 1, "data_size", 1),
    ("DataSize", 50, "data_size", 50),
    ("InferDevice", "cpu", "infer_device", "cpu"),
    ("SelectiveUpdate", True, "is_selective", True),
    ("SelectiveUpdate", False, "is_selective", False),
    ("TargetOpType", ["Conv", "Gemm"], "op_types", ("Conv", "Gemm")),
    ("TargetOpType", list(TRAINED_OP_TYPES), "op_types", TRAINED_OP_TYPES),
    ("MemOptLevel", 0, "memory_limit", NO_LIMIT),
    ("MemOptLevel", 1, "memory_limit", FinetuneOptions().memory_limit),
    ("MemOptLevel", 2, "memory_limit", 0),
    ("MemoryLimit", 100, "memory_limit", 100 * MEGABYTE),
    ("MemoryLimit", 0.5, "memory_limit", MEGABYTE // 2),
    ("CacheDir", "folder", "folder", Path("folder")),
    ("CacheDir", Path("other"), "folder", Path("other")),
    ("CacheDir", None, "folder", None),
    ("Reconstruction", "layer", "reconstruction", Reconstruction.LAYER),
    ("Reconstruction", "block", "reconstruction", Reconstruction.BLOCK),
    ("OutputIndex", None, "output_index", None),
    ("OutputIndex", 0, "output_index", 0),
    ("OutputIndex", 2, "output_index", 2),
    ("RefModelPath", None, "reference", None),
    ("RefModelPath", __file__, "reference", Path(__file__)),
    ("Parallel", False, "is_parallel", False),
    ("Parallel", True, "is_parallel", True),
    ("SelectMaxMemLayer", False, "is_largest_only", False),
    ("SelectMaxMemLayer", True, "is_largest_only", True),
]
NEEDLESS = {"DynamicBatch": True, "NumWorkers": 4, "PinMemory": True, "UseGDS": True}  # cannot change a result here


@pytest.mark.parametrize(("key", "value", "field", "expected"), FIT)
def test_settings_of_the_fit_are_carried_out(key, value, field, expected):
    assert getattr(options_of(**{key: value}).fit, field) == expected
    assert settings_of(finetuned(**{key: value})).remarks == ()


@pytest.mark.parametrize(("key", "value", "field", "expected"), RUN)
def test_settings_of_the_run_are_carried_out(key, value, field, expected):
    assert getattr(options_of(**{key: value}), field) == expected
    assert settings_of(finetuned(**{key: value})).remarks == ()


def test_every_key_is_tested_with_two_values():
    on_gpus = {"OptimDevice", "InferDevice"}  # below
    values = {key: [row[1] for row in (*FIT, *RUN) if row[0] == key] for key in FINETUNE_KEYS}
    assert {key for key, value in values.items() if len(value) < 2} == on_gpus | NEEDLESS.keys()
    assert {row[0] for row in (*FIT, *RUN)} | NEEDLESS.keys() == FINETUNE_KEYS.keys()


@pytest.mark.parametrize("key", NEEDLESS)
def test_settings_that_cannot_matter_are_remarked_on(key):
    settings = settings_of(finetuned(**{key: NEEDLESS[key]}))
    assert settings.refine.finetune == options_of()
    assert [remark.partition(":")[0] for remark in settings.remarks] == [f"FastFinetune.{key}"]
    assert settings_of(finetuned(**{key: type(NEEDLESS[key])(0)})).remarks == ()


def test_without_settings_the_defaults_are_those_of_the_documents():
    options = settings_of(QuantizationConfig(include_fast_ft=True)).refine.finetune
    assert options == options_of() == FinetuneOptions(FitOptions(batch_rows=ROWS_OF_A_SAMPLE))
    assert options.fit.algorithm is Algorithm.ADAROUND
    assert (options.fit.learning_rate, options.fit.iterations, options.fit.device) == (0.1, 1000, "cpu")
    assert options.fit.has_bias
    assert options.data_size is None


def test_the_learning_rate_of_adaquant_is_found_unless_given():
    assert options_of(OptimAlgorithm="adaquant").fit.learning_rate is None
    assert options_of(OptimAlgorithm="adaquant", LearningRate=1e-5).fit.learning_rate == 1e-5


def test_it_is_off_unless_asked_for():
    assert settings_of(QuantizationConfig()).refine.finetune is None
    off = settings_of(QuantizationConfig(extra_options={"FastFinetune": {"DataSize": 3}}))
    assert off.refine.finetune is None
    assert off.remarks == ("FastFinetune: include_fast_ft is False, so that there is nothing for it to steer",)


def test_what_is_adarounds_alone_is_remarked_on():
    given = {"RegParam": 0.1, "BetaRange": (10, 2), "WarmStart": 0.1}
    remarks = settings_of(finetuned(OptimAlgorithm="adaquant", **given)).remarks
    assert remarks == tuple(f"FastFinetune.{key}: it is AdaRound's, and OptimAlgorithm is adaquant" for key in given)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"OptimAlgorithm": "adam"}, InvalidValueError, "expected one of adaround, adaquant"),
        ({"LearningRate": 0}, InvalidValueError, "a number above 0, or 'auto'"),
        ({"LearningRate": float("nan")}, InvalidValueError, "a number above 0, or 'auto'"),
        ({"LearningRate": "fast"}, InvalidValueError, "a number above 0, or 'auto'"),
        ({"LearningRate": None}, UnsupportedTypeError, "a number above 0, or 'auto'"),
        ({"BatchSize": 0}, InvalidValueError, "an integer of at least 1"),
        ({"DataSize": 0}, InvalidValueError, "an integer of at least 1"),
        ({"NumIterations": -1}, InvalidValueError, "an integer of at least 0"),
        ({"OptimDevice": "gpu"}, InvalidValueError, "OptimDevice.*expected cpu, cuda, cuda:N, hip or hip:N"),
        ({"OptimDevice": "cuda:x"}, InvalidValueError, "cuda:N"),
        ({"OptimDevice": "cpu:0"}, InvalidValueError, "cuda:N"),
        ({"InferDevice": "npu"}, InvalidValueError, "InferDevice.*expected cpu, cuda, cuda:N, hip or hip:N"),
        ({"InferDevice": 0}, UnsupportedTypeError, "cuda:N"),
        ({"LRAdjust": (1,)}, UnsupportedTypeError, "two numbers"),
        ({"LRAdjust": (1, 0)}, InvalidValueError, "above 0"),
        ({"TargetOpType": ["Conv", "Covn"]}, UnknownNameError, "Known: Conv, ConvTranspose, Gemm, MatMul, Instance"),
        ({"TargetOpType": ["Relu"]}, UnknownNameError, "LayerNormalization"),
        ({"TargetOpType": []}, InvalidValueError, "nothing would be trained"),
        ({"DropRatio": 1.5}, InvalidValueError, "from 0 to 1"),
        ({"DropRatio": -1}, InvalidValueError, "from 0 to 1"),
        ({"MemOptLevel": 3}, InvalidValueError, "from 0 to 2"),
        ({"MemOptLevel": 0, "MemoryLimit": 100}, InvalidValueError, "MemOptLevel 0 says no limit"),
        ({"MemOptLevel": 2, "MemoryLimit": 100}, InvalidValueError, "MemOptLevel 2 says nothing in memory"),
        ({"MemoryLimit": -1}, InvalidValueError, "at least 0"),
        ({"Reconstruction": "network"}, InvalidValueError, "one of layer, block"),
        ({"BetaRange": (20, 0)}, InvalidValueError, "at least 1"),
        ({"WarmStart": 2}, InvalidValueError, "from 0 to 1"),
        ({"LearnRate": 0.1}, UnknownNameError, "Did you mean LearningRate"),
    ],
)
def test_mistakes_are_named(settings, error, message):
    with pytest.raises(error, match=message):
        options_of(**settings)


def test_a_limit_beside_the_usual_level_is_no_contradiction():
    assert options_of(MemOptLevel=1, MemoryLimit=3).memory_limit == 3 * MEGABYTE


class Gpus:
    def __init__(self, count: int) -> None:
        self.device_count = lambda: count
        self.is_available = lambda: count > 0


@pytest.mark.parametrize(
    ("device", "name"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("hip", "cuda:0"), ("hip:0", "cuda:0")]
)
def test_gpus_have_the_names_of_torch(device, name, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Gpus(2)))
    assert options_of(OptimDevice=device).fit.device == name


@pytest.mark.parametrize(
    ("count", "device", "there"),
    [(0, "cuda:0", "only cpu\\."), (0, "hip", "only cpu\\."), (1, "cuda:1", "only cpu, cuda:0\\.")],
)
def test_a_gpu_that_is_not_there_is_an_error_when_the_quantizer_is_built(count, device, there, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Gpus(count)))
    with pytest.raises(InvalidValueError, match=f"OptimDevice '{device}': torch has no such device here, {there}"):
        ModelQuantizer(finetuned(OptimDevice=device))


@pytest.mark.parametrize("given", ["cpu", None])
def test_the_device_of_the_run_is_that_of_the_walk(given, monkeypatch):
    monkeypatch.setattr(devices, "driver", lambda: devices.Driver(("a GPU", "another"), "13.0"))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    config = finetuned(**({} if given is None else {"InferDevice": given}))
    config.extra_options["InferDevice"] = "cuda:1"
    assert settings_of(config).refine.finetune.infer_device == "cuda:1"
    config.extra_options["FastFinetune"]["InferDevice"] = "cuda:0"
    assert settings_of(config).refine.finetune.infer_device == "cuda:0"


@pytest.mark.parametrize(
    ("device", "provider"),
    [
        ("cuda", "CUDAExecutionProvider"),
        ("cuda:0", "CUDAExecutionProvider"),
        ("hip", "ROCMExecutionProvider"),
        ("hip:0", "MIGraphXExecutionProvider"),
    ],
)
def test_inference_on_a_gpu_needs_a_provider_for_it(device, provider, monkeypatch):
    monkeypatch.setattr(devices, "driver", lambda: devices.Driver(("a GPU",), "13.0"))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [provider, "CPUExecutionProvider"])
    assert options_of(InferDevice=device).infer_device == device
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(
        MissingDependencyError, match=rf"FastFinetune\.InferDevice, device '{device[:3]}.*this ONNX Runtime"
    ):
        ModelQuantizer(finetuned(InferDevice=device))


@pytest.mark.parametrize("config", [finetuned(), "XINT8_ADAROUND", "MXINT8_ADAQUANT"], ids=str)
def test_without_torch_the_error_names_the_extra_before_any_work(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match="pip install torch"):
        ModelQuantizer(config)
    with pytest.raises(MissingDependencyError, match="not installed"):
        quantize("a file that is never looked for.onnx", None, config)
    ModelQuantizer(QuantizationConfig())


def test_configs_are_read_without_torch():
    program = """
import sys
import quark.onnx
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.presets import PRESETS
for name in PRESETS:
    settings_of(name)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_torch_that_cannot_be_found_is_not_there(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install torch"):
        settings_of("MX4_ADAQUANT")


# Settings of an entry, field of the fit or of the run, its value there.
ENTRY: list[Any] = [
    ({"optim_device": "cpu"}, "fit.device", "cpu"),
    ({"infer_device": "cpu"}, "infer_device", "cpu"),
    ({"fixed_seed": 3}, "fit.seed", 3),
    ({"data_size": 5}, "data_size", 5),
    ({"batch_size": 2}, "fit.batch_rows", 2 * ROWS_OF_A_SAMPLE),
    ({"num_batches": -1}, "fit.batches", -1),
    ({"num_iterations": 9}, "fit.iterations", 9),
    ({"learning_rate": 0.5}, "fit.learning_rate", 0.5),
    ({"learning_rate": "auto"}, "fit.learning_rate", None),
    ({"early_stop": True}, "fit.has_early_stop", True),
    ({"lr_adjust": (0.1, 0.2)}, "fit.lr_adjust", (0.1, 0.2)),
    ({"target_op_type": ["Gemm"]}, "op_types", ("Gemm",)),
    ({"selective_update": True}, "is_selective", True),
    ({"update_bias": True}, "fit.has_bias", True),
    ({"output_qdq": True}, "fit.has_output_rounding", True),
    ({"drop_ratio": 0.25}, "fit.drop_ratio", 0.25),
    ({"mem_opt_level": 2}, "memory_limit", 0),
    ({"cache_dir": "c"}, "folder", Path("c")),
    ({"log_period": 3}, "fit.log_period", 3),
    ({"reg_param": 0.5}, "fit.regularization", 0.5),
    ({"beta_range": (10, 3)}, "fit.beta_range", (10.0, 3.0)),
    ({"warm_start": 0.1}, "fit.warm_start", 0.1),
    ({"output_index": 0}, "output_index", None),  # its default, which stands for all outputs
    ({"output_index": 1}, "output_index", 1),
    ({"ref_model_path": __file__}, "reference", Path(__file__)),
    ({"parallel": True}, "is_parallel", True),
    ({"select_max_mem_layer": True}, "is_largest_only", True),
]
HARMLESS = [{"num_workers": 4}, {"pin_memory": True}, {"use_gds": True}, {"dynamic_batch": True}]


def of_entry(entry) -> FinetuneOptions:
    options = settings_of(QConfig(INT8, algo_config=[entry])).refine.finetune
    assert options is not None
    return options


@pytest.mark.parametrize("kind", [AdaRoundConfig, AdaQuantConfig], ids=lambda each: each.name)
@pytest.mark.parametrize(("settings", "field", "expected"), ENTRY)
def test_settings_of_an_entry_are_carried_out(settings, field, expected, kind):
    found = of_entry(kind(**settings))
    for name in field.split("."):
        found = getattr(found, name)
    assert found == expected


@pytest.mark.parametrize("settings", HARMLESS, ids=lambda each: next(iter(each)))
def test_or_change_nothing_and_are_remarked_on(settings):
    usual, changed = (
        settings_of(QConfig(INT8, algo_config=[entry])) for entry in (AdaRoundConfig(), AdaRoundConfig(**settings))
    )
    assert usual.refine == changed.refine
    (remark,) = set(changed.remarks) - set(usual.remarks)
    assert remark.startswith("FastFinetune.")


def test_every_setting_of_an_entry_is_one_of_these():
    known = {name for settings in (*(row[0] for row in ENTRY), *HARMLESS) for name in settings}
    assert known == {field.name for field in fields(AdaRoundConfig)} == {field.name for field in fields(AdaQuantConfig)}


def test_entries_have_their_own_defaults():
    adaround, adaquant = of_entry(AdaRoundConfig()).fit, of_entry(AdaQuantConfig()).fit
    assert (adaround.algorithm, adaround.learning_rate, adaround.iterations) == (Algorithm.ADAROUND, 0.1, 1000)
    assert (adaquant.algorithm, adaquant.learning_rate, adaquant.iterations) == (Algorithm.ADAQUANT, 1e-5, 3000)
    assert not adaround.has_bias
    assert settings_of(QConfig(INT8, algo_config=[AdaQuantConfig()])).remarks == ()


def test_one_entry_finetunes_beside_others():
    both = settings_of(QConfig(INT8, algo_config=[BiasCorrectionConfig(), AdaQuantConfig()])).refine
    assert both.bias_correction is not None
    assert both.finetune is not None
    with pytest.raises(InvalidValueError, match="trained by one of them"):
        settings_of(QConfig(INT8, algo_config=[AdaRoundConfig(), AdaQuantConfig()]))
    with pytest.raises(InvalidValueError, match="'FastFinetune' .* say different things"):
        settings_of(QConfig(INT8, algo_config=[AdaRoundConfig()], FastFinetune={"DataSize": 3}))
    with pytest.raises(UnsupportedTypeError, match="TargetOpType"):
        settings_of(QConfig(INT8, algo_config=[AdaRoundConfig(target_op_type=3)]))


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_config_survives_its_file(suffix, tmp_path: Path):
    config = finetuned(LearningRate="auto", LRAdjust=(0.5, 0.1), TargetOpType=["Conv"], BetaRange=(10, 2))
    loaded = QuantizationConfig.load(config.save(tmp_path / f"c{suffix}"))
    assert settings_of(loaded).refine == settings_of(config).refine
    entry = QConfig(INT8, algo_config=[AdaQuantConfig(learning_rate="auto", target_op_type=["Conv"], cache_dir="c")])
    assert settings_of(QConfig.load(entry.save(tmp_path / f"q{suffix}"))).refine == settings_of(entry).refine


@pytest.mark.parametrize("data_size", [None, 1_000_000_000])
def test_random_data_stay_few(data_size):
    import onnx_ir as ir

    config = get_default_config("MXINT8")
    config.include_fast_ft = True
    config.extra_options["FastFinetune"] = {} if data_size is None else {"DataSize": data_size}
    samples = Data(is_random=True).open(ir.from_proto(mixed_network()), settings_of(config))
    assert samples.is_random
    assert samples.count == 8


@pytest.mark.parametrize("name", ["A8W8_ADAROUND", "MXINT8_ADAQUANT"])
@pytest.mark.parametrize("has_data", [True, False])
def test_a_model_is_finetuned(name, has_data, tmp_path):
    config = get_default_config(name)
    config.extra_options["FastFinetune"] |= {"NumIterations": 5, "DataSize": 12, "CacheDir": tmp_path}
    data = images() if has_data else None
    report = quantize(mixed_network(), data, config, use_random_data=not has_data).report
    facts = report.algorithms[-1]
    assert facts.name == ("AdaRound" if "ADAROUND" in name else "AdaQuant")
    assert facts.changed or facts.left
    assert np.isfinite(report.outputs[0].sqnr_db)
    assert report.calibration.is_random is not has_data
    assert any("random numbers took its place" in remark for remark in report.remarks) is not has_data


def test_an_entry_finetunes_a_model(tmp_path):
    entry = AdaRoundConfig(num_iterations=5, data_size=8, update_bias=True, cache_dir=tmp_path)
    report = quantize(mixed_network(), images(), QConfig(INT8, algo_config=[entry])).report
    assert "AdaRound" in [algorithm.name for algorithm in report.algorithms]
