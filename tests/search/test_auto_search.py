"""AutoSearch and AutoSearchPro quantize, compare with float, and keep what is best."""

from __future__ import annotations

import json
import logging

import numpy as np
import onnx
import pytest
from onnx_models import conv_bn_relu, random_feed

from quark.errors import InvalidValueError, UnknownNameError, UnsupportedOptionError, UnsupportedTypeError
from quark.onnx import (
    AutoSearch,
    AutoSearchPro,
    CalibrationMethod,
    Config,
    QuantizationConfig,
    QuantType,
    get_auto_search_config,
)
from quark.onnx.auto_search import AutoSearchConfig
from quark.onnx.quantization.auto_search.auto_search_pro import replace_keys, validate_keys
from quark.onnx.session import open_session
from quark.search.auto_search_pro import Study
from quark.search.distances import cos_metric, l1_metric, l2_metric, psnr_metric, ssim_metric
from quark.search.study_page import importances

A, B = np.array([3.0, 4, 5, 6]), np.array([2.0, 3, 4, 5])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    onnx.save(conv_bn_relu(), path)
    return str(path)


@pytest.fixture(scope="module")
def data(model):
    return [random_feed(onnx.load(model), seed) for seed in range(3)]


class Reader:
    """Samples one after the other; it cannot be rewound."""

    def __init__(self, samples):
        self._left = list(samples)

    def get_next(self):
        return self._left.pop(0) if self._left else None


def settings_for(folder, **changes):
    settings = AutoSearchConfig()
    settings.search_cache_dir, settings.search_output_dir = str(folder / "cache"), str(folder / "out")
    settings.search_log_path = str(folder / "search.log")
    settings.search_space = {"activation_type": [QuantType.QInt8, QuantType.QInt16], "include_cle": [False]}
    for name, value in changes.items():
        setattr(settings, name, value)
    return settings


def search(model, data, settings, **options):
    return AutoSearch(model, Config(QuantizationConfig(**options)), settings, calibration_data_reader=Reader(data))


def outputs(path, sample):
    return np.concatenate([each.reshape(-1) for each in open_session(path).run(None, sample)])


def test_metrics():
    assert (l2_metric(A, B), l1_metric(A, B)) == (1, 1)
    assert cos_metric(A, B) == pytest.approx(0.5 + 0.5 * (A @ B) / np.sqrt((A @ A) * (B @ B)))
    assert cos_metric(A, 0 * A) == 0
    assert psnr_metric(A, B) == pytest.approx(20 * np.log10(255))
    assert psnr_metric(A, A) == 100
    assert ssim_metric(A, B) == pytest.approx(0.97436, abs=1e-5)


def test_all_configs_within_the_tolerance_are_kept(model, data, tmp_path):
    found = search(model, data, settings_for(tmp_path))
    candidates = found.search_model()
    assert [candidate["config_index"] for candidate in candidates] == [0, 1]
    assert candidates[0]["difference"] > candidates[1]["difference"] > 0  # 8 bits, 16 bits
    expected = np.mean([np.mean((outputs(model, x) - outputs(candidates[0]["model_path"], x)) ** 2) for x in data])
    assert candidates[0]["difference"] == pytest.approx(expected, rel=1e-3)
    assert found.best_candidate is candidates[1]
    assert (tmp_path / "out" / "iter_0.onnx").is_file()
    assert not list((tmp_path / "cache").iterdir())
    assert "config 1: distance" in (tmp_path / "search.log").read_text()
    tolerance = candidates[1]["difference"]
    again = search(model, data, settings_for(tmp_path, search_metric_tolerance=tolerance)).search_model()
    assert [each["config_index"] for each in again] == [1]
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"iter_1.onnx", "iter_1.json"}


def test_every_config_starts_from_the_one_that_was_given(model, data, tmp_path):
    found = search(model, data, settings_for(tmp_path), per_channel=True, extra_options={"FoldRelu": True})
    first = found.applied(
        {"include_cle": True, "extra_options": {"FoldRelu": False, "FastFinetune": {"NumIterLR": [7, 0.5]}}}
    )
    assert (first.per_channel, first.include_cle, first.extra_options["FoldRelu"]) == (True, True, False)
    assert first.extra_options["FastFinetune"] == {"NumIterations": 7, "LearningRate": 0.5}
    assert found.applied({}).extra_options == {"FoldRelu": True}


def test_stop_conditions_order_and_evaluator(model, data, tmp_path):
    seen = []

    def evaluator(path):
        seen.append(path)
        return 10.0 if path == model else 10.0 - len(seen)

    settings = settings_for(tmp_path, search_evaluator=evaluator, search_algo="random", search_metric_tolerance=3)
    settings.search_stop_condition = {"find_n_candidates": 1, "iteration_limit": -1, "time_limit": -1}
    found = search(model, data, settings)
    assert [each["difference"] for each in found.search_model()] == [2.0]
    assert len(seen) == 2
    settings.search_stop_condition = {"iteration_limit": 1}
    assert len(search(model, data, settings).search_model()) == 0  # the distance is 4 by now
    assert AutoSearchConfig().search_stop_condition["find_n_candidates"] == 1e3


def test_two_stages(model, data, tmp_path):
    methods = [CalibrationMethod.MinMax, CalibrationMethod.Entropy]
    space = {
        "calibrate_method": methods,
        "extra_options": {"FastFinetune": {"NumIterations": [2, 3], "OptimAlgorithm": ["adaround"], "DataSize": [2]}},
    }
    settings = settings_for(tmp_path, search_space=space, two_stage_search=True)
    found = search(model, data, settings)
    (best,) = found.search_model()
    assert found.iterations == 2 + 2
    distances = found.searched_space
    assert best["calibrate_method"] is methods[min((0, 1), key=distances.get)]
    assert best["include_fast_ft"]
    assert best["extra_options"]["FastFinetune"]["NumIterations"] == (2, 3)[min((2, 3), key=distances.get) - 2]


def test_settings_of_finetuning_are_sampled(model, data, tmp_path):
    space = {"extra_options": {"FastFinetune": {"NumIterations": [1, 3], "LearningRate": [1e-3, 1e-5]}}}
    params = {"sampler_algo": "Random", "n_trials": 3}
    settings = settings_for(
        tmp_path, search_space=space, advanced_fastft_search=True, advanced_fastft_params=params, search_devices="cpu"
    )
    best = search(model, data, settings, extra_options={"FastFinetune": {"DataSize": 2}}).search_model()
    assert best["NumIterations"] in (1, 2, 3)
    assert 1e-5 <= best["LearningRate"] <= 1e-3
    settings.search_space = {"extra_options": {"FastFinetune": {"DataSize": [1, 2]}}}
    with pytest.raises(UnsupportedOptionError, match="the space has DataSize"):
        search(model, data, settings).search_model()


def test_a_config_that_fails_is_noted_and_all_failing_is_an_error(model, data, tmp_path):
    settings = settings_for(tmp_path, search_space={"weight_type": [QuantType.QInt8, 3]})
    found = search(model, data, settings)
    assert len(found.search_model()) == 1
    assert "weight_type" in found.failures[1]
    settings.search_space = {"include_cl": [True]}
    with pytest.raises(InvalidValueError, match="none of 1 configs could be quantized.*include_cl"):
        search(model, data, settings).search_model()


def test_bad_arguments(model, data, tmp_path):
    settings = settings_for(tmp_path)
    with pytest.raises(UnsupportedOptionError, match="crypto_mode"):
        search(model, data, settings, crypto_mode=True)
    with pytest.raises(UnsupportedTypeError, match="config: expected a Config"):
        AutoSearch(model, "A8W8", settings, calibration_data_reader=Reader(data))
    with pytest.raises(InvalidValueError, match="AutoSearch needs data"):
        AutoSearch(model, Config(QuantizationConfig()), settings)


# ---- AutoSearchPro ----

SPACE = {
    "activation": ["Int8Spec", "Int16Spec"],
    "activation_params": {"symmetric": [True], "calibration_method": ["MinMax", "Entropy"], "only_if": "activation"},
    "weight": ["Int8Spec"],
    "weight_params": {"quant_granularity": ["Channel"], "only_if": "weight"},
    "cle_algo": [None],
    "OptimizeModel": [True],
}


def pro(model, data, folder, **changes):
    settings = {
        "search_space": SPACE,
        "model_input": model,
        "calib_data_reader": Reader(data),
        "output_dir": str(folder / "out"),
        "temp_dir": str(folder / "temp"),
        "n_trials": 4,
    }
    return AutoSearchPro({**settings, **changes})


def test_grid(model, data, tmp_path):
    best = pro(model, data, tmp_path, search_algo="Grid").run()
    assert best["activation"] == "Int16Spec"
    assert best["weight_params"] == {"quant_granularity": "Channel"}
    names = {each.name for each in (tmp_path / "out").glob("*.onnx")}
    assert names == {f"quantized_model{number}.onnx" for number in range(4)}
    assert "grid search, config 0: " in (tmp_path / "out" / "auto_search.log").read_text()
    worst = pro(model, data, tmp_path, search_algo="Grid", direction="maximize").run()
    assert worst["activation"] == "Int8Spec"


def test_sampled_search_writes_its_best_and_continues(model, data, tmp_path):
    changes = {"search_algo": "Random", "study_storage_db": "study.db", "plot_results": True, "seed": 4}
    best = pro(model, data, tmp_path, **changes).run()
    assert best["activation"] == "Int16Spec"
    assert best == json.loads((tmp_path / "out" / "best_params.json").read_text())
    assert set(best) == {
        *("activation", "activation_params_symmetric", "activation_params_calibration_method", "weight"),
        *("weight_params_quant_granularity", "cle_algo", "OptimizeModel"),
    }
    assert "polyline" in (tmp_path / "out" / "opt_history.html").read_text()
    assert "activation_params_symmetric" in (tmp_path / "out" / "param_importance.html").read_text()
    with pytest.raises(InvalidValueError, match="load_study_if_exists"):
        pro(model, data, tmp_path, **changes).run()
    pro(model, data, tmp_path, **changes, load_study_if_exists=True, n_trials=1).run()
    trials = Study(tmp_path / "out" / "study.db", "AutoSearch", "minimize", continues=True).trials
    assert [trial["number"] for trial in trials] == [0, 1, 2, 3, 4]
    assert (tmp_path / "out" / "quantized_model_4.onnx").is_file()
    assert not list((tmp_path / "temp").iterdir())


def test_a_damaged_journal_names_itself(model, data, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "study.db").write_bytes(b"SQLite format 3\0")
    with pytest.raises(InvalidValueError, match="study.db"):
        pro(model, data, tmp_path, study_storage_db="study.db").run()
    with pytest.raises(InvalidValueError, match="name of a file in output_dir"):
        pro(model, data, tmp_path, study_storage_db="../study.db").run()


def test_second_stage_builds_on_the_first(model, data, tmp_path):
    space = {**SPACE, "algorithms": ["adaround"], "OptimizeModel": [False]}
    space["adaround_params"] = {"NumIterLR": [[1, 0.1]], "data_size": [2], "only_if": {"algorithms": "adaround"}}
    found = pro(model, data, tmp_path, search_space=space, two_stage_search=True, search_algo="Grid")
    best = found.run()
    assert best["activation"] == "Int16Spec"
    assert best["adaround_params"]["NumIterLR"] == [1, 0.1]
    config = found.qconfig({**best, "OptimizeModel": False})
    (algorithm,) = config.algo_config
    assert (algorithm.num_iterations, algorithm.learning_rate) == (1, 0.1)
    assert config.extra_options["OptimizeModel"] is False


def test_keys(caplog):
    logger = logging.getLogger("keys")
    found = validate_keys(["algorithms", "cle_algo"], ["algorithm", "cle_alg"], logger)
    assert replace_keys({"algorithm": 1, "cle_alg": 2}, found) == {"algorithms": 1, "cle_algo": 2}
    assert "'algorithm' is read as 'algorithms'" in caplog.text
    with pytest.raises(UnknownNameError, match="zzz"):
        validate_keys(["algorithms"], ["zzz"], logger)


def test_bad_settings(model, data, tmp_path):
    with pytest.raises(InvalidValueError, match="model_input: None"):
        pro(None, data, tmp_path)
    with pytest.raises(UnknownNameError, match="direction"):
        pro(model, data, tmp_path, direction="down")
    with pytest.raises(UnsupportedOptionError, match="base_framework 'torch'"):
        pro(model, data, tmp_path, base_framework="torch")
    with pytest.raises(InvalidValueError, match="none of 1 configs could be quantized.*spec 'Int7Spec'"):
        pro(model, data, tmp_path, search_space={"activation": ["Int7Spec"]}, search_algo="Grid").run()
    with pytest.raises(InvalidValueError, match="calib_data_reader"):
        AutoSearchPro(
            {
                **get_auto_search_config("XINT8_SEARCH"),
                "model_input": model,
                "output_dir": str(tmp_path),
                "temp_dir": str(tmp_path / "t"),
            }
        )


def test_importance_is_the_variance_explained():
    trials = [{"number": n, "params": {"a": n % 2, "b": "x"}, "value": float(n % 2)} for n in range(8)]
    assert importances(trials) == {"a": 1.0, "b": 0.0}
