"""AutoSearchPro: sample configurations of a space with conditions, and find the one whose outputs are closest to float.

    settings = get_auto_search_config("A8W8_SEARCH")
    settings.update(model_input="model.onnx", calib_data_reader=reader, output_dir="search")
    best = AutoSearchPro(settings).run()

Files in the output folder: the quantized models, best_params.json, auto_search.log, and the journal `study_storage_db`,
from which the next search with the same study name continues.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError, unknown_name
from quark.files.foreign import RECORD, Fields, read_json
from quark.files.output import complete, writing
from quark.onnx.data import CachedDataReader
from quark.onnx.quantization.config import data_type as data_types
from quark.onnx.quantization.config import spec as specs
from quark.onnx.quantization.config.algorithm import ALGORITHMS, AlgoConfig
from quark.onnx.quantization.config.config import QConfig
from quark.onnx.quantization.config.data_type import DataType
from quark.onnx.quantization.config.option_table import OPTIONS
from quark.onnx.quantization.config.spec import (
    CalibMethod,
    QLayerConfig,
    QTensorConfig,
    QuantGranularity,
    ScaleType,
)
from quark.onnx.quantization.output_eval import (
    calculate_cos,
    calculate_l1_distance,
    calculate_l2_distance,
    calculate_psnr,
    calculate_ssim,
)
from quark.onnx.quantization.quantizer import ModelQuantizer
from quark.search.auto_search import log_file, usable_devices
from quark.search.distances import FloatOutputs, Metric, SpareReader, feeds
from quark.search.samplers import Sampler, Values, nested, sampler_named
from quark.search.search_configs import DEFAULTS, get_auto_search_config
from quark.search.spaces import Config, Space, generate_all_configs, space_of
from quark.search.study_page import history_page, importance_page
from quark.text import get_logger, json_value

METRICS: dict[str, Metric] = {
    "L2": calculate_l2_distance,
    "L1": calculate_l1_distance,
    "cos": calculate_cos,
    "psnr": calculate_psnr,
    "ssim": calculate_ssim,
}
_LARGER_IS_BETTER = ("cos", "psnr", "ssim")
_LAYER_KEYS = ("activation", "activation_params", "weight", "weight_params")
_QCONFIG_KEYS = ("specific_layer_config", "layer_type_config", "exclude", "use_external_data_format")
_ALGORITHM_KEYS = ("algorithms", "cle_algo", *(f"{name}_params" for name in ALGORITHMS))
_JOINT_KEY = "NumIterLR"
_DEVICES = ("optim_device", "infer_device")


def validate_keys(
    reference_keys: Sequence[str], input_keys: Sequence[str], logger_ins: logging.Logger, cutoff: float = 0.6
) -> dict[str, str]:
    """Map each unknown key to the closest known one, with a warning. Raises an error if none is close."""
    replacements = {}
    for key in input_keys:
        if key in reference_keys:
            continue
        alike = difflib.get_close_matches(key, reference_keys, n=1, cutoff=cutoff)
        if not alike:
            raise unknown_name("setting of a search", key, reference_keys)
        logger_ins.warning("unknown setting '%s' is read as '%s'", key, alike[0])
        replacements[key] = alike[0]
    return replacements


def replace_keys(input_dict: dict[str, Any], replaced_dict: Mapping[str, str]) -> dict[str, Any]:
    """Rename keys of a dictionary in place, and return it."""
    for old, new in replaced_dict.items():
        input_dict[new] = input_dict.pop(old)
    return input_dict


class AutoSearchPro:
    """A search with a sampler. The settings are a dictionary, see `get_auto_search_config`:

    search_space          {name: [values], group: {"only_if": condition, setting: [values] or a range}}. Names:
                          activation and weight (a spec), algorithms and cle_algo, their settings in activation_params,
                          weight_params, adaround_params ..., fields of a QConfig and extra options
    model_input           the float model
    calib_data_reader     what to calibrate with; eval_data_reader: what to compare outputs on, the same by default
    search_algo           'TPE' or 'Random', 'Grid' for all combinations in order, or a sampler of optuna
    search_metric         'L2', 'L1', 'cos', 'psnr' or 'ssim' between outputs of float and quantized model
    search_evaluator      a function of a model's path, used instead; the score is its value for float minus this
    direction             'minimize' or 'maximize' the score
    n_trials              how many points are tried; n_jobs has no effect, since each trial uses all processors
    two_stage_search      search all combinations without finetuning first, then finetuning on top of the best
    study_storage_db      the journal; load_study_if_exists: continue the study `study_name` in it
    plot_results          write opt_history.html and param_importance.html
    seed                  of the sampler
    """

    def __init__(self, config: dict[str, Any]) -> None:
        if not isinstance(config, dict):
            raise UnsupportedTypeError(f"config: expected a dictionary, got {type(config).__name__}")
        self.config = dict(config)
        self.output_dir = Path(self.config.get("output_dir") or DEFAULTS["output_dir"])
        self.temp_dir = Path(self.config.get("temp_dir") or DEFAULTS["temp_dir"])
        for folder in (self.output_dir, self.temp_dir):
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
        self.logger = get_logger("auto_search_pro")
        replace_keys(self.config, validate_keys(["search_space", *DEFAULTS], list(self.config), self.logger))
        self._read_settings()
        self._read_data()

    def _read_settings(self) -> None:
        config, logger = self.config, self.logger
        default_space = get_auto_search_config("ADVANCED_SEARCH")["search_space"]
        self.search_space: dict[str, Any] = copy.deepcopy(dict(config.get("search_space") or default_space))
        known = [*_LAYER_KEYS, *_QCONFIG_KEYS, *_ALGORITHM_KEYS, *OPTIONS]
        replace_keys(self.search_space, validate_keys(known, list(self.search_space), logger))
        self.sampler_algo = config.get("search_algo") or DEFAULTS["search_algo"]
        self.direction = config.get("direction") or DEFAULTS["direction"]
        if self.direction not in ("minimize", "maximize"):
            raise unknown_name("direction", self.direction, ("minimize", "maximize"))
        self.evaluator: Callable[[str], float] | None = config.get("search_evaluator")
        name = config.get("search_metric") or "L2"
        self.metric_name = validate_keys(list(METRICS), [name], logger).get(name, name)
        self.metric = METRICS[self.metric_name]
        if self.evaluator is None and self.metric_name in _LARGER_IS_BETTER and self.direction == "minimize":
            logger.warning(
                "search_metric '%s' is better when higher, but the direction is 'minimize': set it to 'maximize'", name
            )
        if (config.get("base_framework") or "onnx") != "onnx":
            raise UnsupportedOptionError(
                f"base_framework {config['base_framework']!r}: models are ONNX files; leave it out"
            )
        self.two_stage_search = bool(config.get("two_stage_search", False))
        self.study_storage_db: str | None = config.get("study_storage_db")
        self.load_study_if_exists = bool(config.get("load_study_if_exists", False))
        self.study_name = config.get("study_name") or DEFAULTS["study_name"]
        self.plot_results = bool(config.get("plot_results", False))
        self.n_trials = int(config.get("n_trials") or DEFAULTS["n_trials"])
        if int(config.get("n_jobs") or 1) > 1:
            logger.warning("n_jobs has no effect: each quantization uses all processors, so trials run one at a time")
        space = space_of(self.search_space)
        if space.is_discrete and self.n_trials > (count := len(generate_all_configs(self.search_space))):
            logger.warning("n_trials %d: the space has only %d points", self.n_trials, count)
            self.n_trials = count

    def _read_data(self) -> None:
        self.model_input = self.config.get("model_input")
        if not isinstance(self.model_input, (str, os.PathLike)):
            raise InvalidValueError(f"model_input: {self.model_input!r}, expected the path of an ONNX model")
        reader = self.config.get("calib_data_reader")
        if reader is None:
            raise InvalidValueError("calib_data_reader: expected a reader of calibration data, got None")
        self.calib_data_reader = CachedDataReader(reader)
        given = self.config.get("eval_data_reader")
        self.eval_data_reader = self.calib_data_reader if given is None else given
        self._float: FloatOutputs | None = None
        self._float_value = 0.0
        self._settled: Config = {}  # fixed by the first stage, and not parameters of the second

    # ---- one trial ----

    def qconfig(self, params: Mapping[str, Any]) -> QConfig:
        """Return the config that a point of the space stands for."""
        rest = copy.deepcopy(dict(params))
        layers: dict[str, QTensorConfig] = {}
        for name in ("activation", "weight"):
            settings = rest.pop(f"{name}_params", {})
            kind = rest.pop(name, None)
            if kind is not None:
                layers[name] = _spec(kind, settings)
        algorithms = []
        for key in ("algorithms", "cle_algo"):
            chosen = rest.pop(key, None)
            if chosen is not None:
                algorithms.append(_algorithm(chosen, rest.get(f"{chosen}_params", {}), self.logger))
        for name in ALGORITHMS:
            rest.pop(f"{name}_params", None)
        fields = {name: value for name in _QCONFIG_KEYS if (value := rest.pop(name, None)) is not None}
        rest.setdefault("PrintSummary", False)
        return QConfig(QLayerConfig(**layers), algo_config=algorithms, **fields, **rest)

    def _score(self, params: Mapping[str, Any], path: Path) -> float:
        """Quantize with a point, and return what is to be minimized or maximized."""
        reader = SpareReader(self.calib_data_reader)
        config = self.qconfig({**self._settled, **params})
        config.extra_options["CalibDataSize"] = reader.limit(config.extra_options.get("CalibDataSize"))
        ModelQuantizer(config).quantize_model(str(self.model_input), path, reader)
        if self.evaluator is not None:
            return self._float_value - float(self.evaluator(str(path)))
        assert self._float is not None
        return self._float.distance(path, self.metric)

    def _attempt(self, params: Mapping[str, Any], path: Path) -> tuple[float | None, str]:
        """Return the score, or None and the reason why there is none."""
        try:
            score = self._score(params, path)
        except Exception as error:  # noqa: BLE001 - one point of many: log and journal have the reason
            reason = " ".join(str(error).split())
            self.logger.warning("%s failed: %s", path.stem, reason)
            return None, reason
        self.logger.info("%s: %g with %s", path.stem, score, params)
        return (None, "the score is NaN") if math.isnan(score) else (score, "")

    def _loss(self, score: float | None) -> float:
        return math.inf if score is None else -score if self.direction == "maximize" else score

    # ---- searches ----

    def run(self) -> dict[str, Any]:
        """Search, and return the best point: by 'Grid' as a config with its groups, else flat, as in best_params.json,
        with the settings of a group under GROUP_SETTING."""
        with log_file(self.logger, self.output_dir / "auto_search.log"):
            try:
                self._measure_float()
                return self._searched()
            finally:
                if self._float is not None:
                    self._float.remove()

    def _measure_float(self) -> None:
        if self.evaluator is None:
            samples = feeds(str(self.model_input), self.eval_data_reader)
            self._float = FloatOutputs(samples, self.temp_dir / "fp_model_output", ("CPUExecutionProvider",))
            self._float.measure(str(self.model_input))
        else:
            self._float_value = float(self.evaluator(str(self.model_input)))
            self.logger.info("float model: %g", self._float_value)

    def _searched(self) -> dict[str, Any]:
        space = self.search_space
        if self.two_stage_search:
            finetuning = {key: space[key] for key in _ALGORITHM_KEYS if key in space and not key.startswith("cle_")}
            best = self.grid_search({key: value for key, value in space.items() if key not in finetuning})
            self.logger.info("best without finetuning: %s", best)
            if not finetuning.get("algorithms"):
                return best
            self._settled = {name: value for name, value in best.items() if not isinstance(value, (str, dict))}
            space = {**finetuning, **_fixed(best)}
        if self.sampler_algo == "Grid":
            return self.grid_search(space, self.n_trials)
        return self._sampled(space_of(space))

    def grid_search(self, grid_search_space: Mapping[str, Any], search_len: int | None = None) -> Config:
        """Try all combinations, or the first `search_len`, and return the best."""
        configs = generate_all_configs(grid_search_space)[:search_len]
        scores: list[float | None] = []
        reasons = []
        for number, config in enumerate(configs):
            score, reason = self._attempt(config, self.output_dir / f"quantized_model{number}.onnx")
            scores.append(score)
            reasons.append(reason)
        if all(score is None for score in scores):
            raise InvalidValueError(f"AutoSearchPro: none of {len(configs)} configs could be quantized. {reasons[0]}")
        order = sorted(range(len(configs)), key=lambda i: self._loss(scores[i]))
        for i in order:
            self.logger.info("grid search, config %d: %s", i, "failed" if scores[i] is None else f"{scores[i]:g}")
        return configs[order[0]]

    def _sampled(self, space: Space) -> Values:
        sampler: Sampler = sampler_named(self.sampler_algo, space, int(self.config.get("seed") or 0))
        study = Study(self._storage(), self.study_name, self.direction, continues=self.load_study_if_exists)
        for trial in study.trials:
            sampler.tell(trial["params"], self._loss(trial["value"]))
        for number in range(len(study.trials), len(study.trials) + self.n_trials):
            values = sampler.ask()
            path = self.output_dir / f"quantized_model_{number}.onnx"
            score, reason = self._attempt(nested(space, values), path)
            sampler.tell(values, self._loss(score))
            study.add(values, score, reason)
        done = [trial for trial in study.trials if trial["value"] is not None]
        if not done:
            raise InvalidValueError(
                f"AutoSearchPro: none of {len(study.trials)} configs could be quantized. {study.trials[0]['failure']}"
            )
        best = min(done, key=lambda trial: self._loss(trial["value"]))
        self.logger.info("best: trial %d, %g with %s", best["number"], best["value"], best["params"])
        self._write("best_params.json", json.dumps(best["params"], indent=2, default=str))
        if self.plot_results:
            self._write("opt_history.html", history_page(study.trials, self.direction))
            self._write("param_importance.html", importance_page(study.trials))
        return dict(best["params"])

    def _storage(self) -> Path | None:
        if self.study_storage_db is None:
            return None
        name = str(self.study_storage_db)
        if Path(name).name != name:
            raise InvalidValueError(
                f"study_storage_db {name!r}: expected the name of a file in output_dir, such as 'a.db'"
            )
        return self.output_dir / name

    def _write(self, name: str, text: str) -> None:
        with complete(self.output_dir / name) as unfinished:
            unfinished.write_text(text, encoding="utf-8")


class Study:
    """The trials of a search under a name, kept in a JSON file that other studies share."""

    def __init__(self, path: Path | None, name: str, direction: str, *, continues: bool) -> None:
        self._path, self._name, self._direction = path, str(name), direction
        self._others: dict[str, Any] = {}
        self.trials: list[dict[str, Any]] = []
        if path is None or not path.exists():
            return
        label = f"study '{path}'"
        content = Fields(read_json(path, label, RECORD), label)
        studies = content.mapping("studies")
        for known in studies:
            self._others[known] = studies.value(known)
        if self._name not in self._others:
            return
        if not continues:
            raise InvalidValueError(
                f"{label} has a study named {self._name!r}: choose another study_name, or set load_study_if_exists"
            )
        study = studies.mapping(self._name)
        del self._others[self._name]
        if study.text("direction") != direction:
            study.refuse("direction", f"'{direction}', which this search has; choose another study_name")
        for number, trial in enumerate(study.mappings("trials")):
            value = float(trial.number("value")) if trial.has("value") else None
            params = trial.mapping("params")
            values = {key: params.value(key) for key in params}
            self.trials.append(_trial(number, values, value, trial.text("failure")))

    def add(self, params: Values, value: float | None, failure: str) -> None:
        """Add a trial, and write the file."""
        self.trials.append(_trial(len(self.trials), params, value, failure))
        if self._path is None:
            return
        own = {"direction": self._direction, "trials": self.trials}
        content = json_value({"studies": {**self._others, self._name: own}})
        with complete(self._path) as unfinished:
            unfinished.write_text(json.dumps(content, default=str), encoding="utf-8")


def _trial(number: int, params: Values, value: float | None, failure: str) -> dict[str, Any]:
    return {"number": number, "params": dict(params), "value": value, "failure": failure}


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names and groups of a config as a space of one point."""
    conditions = {"activation_params": "activation", "weight_params": "weight", "cle_params": {"cle_algo": "cle"}}
    fixed: dict[str, Any] = {}
    for name, value in config.items():
        if name in conditions:
            settings = {key: [setting] for key, setting in value.items()}
            fixed[name] = {**settings, "only_if": conditions[name]}
        elif isinstance(value, str):
            fixed[name] = [value]
    return fixed


_ENUMS: Mapping[str, Any] = {
    "calibration_method": CalibMethod,
    "scale_type": ScaleType,
    "quant_granularity": QuantGranularity,
}


def _spec(kind: Any, settings: Mapping[str, Any]) -> QTensorConfig:
    """Return the spec of that name with its settings; enum members may be given by name."""
    known = {name: cls for name, cls in vars(specs).items() if name.endswith("Spec") and isinstance(cls, type)}
    if kind not in known:
        raise unknown_name("spec", str(kind), known)
    values = dict(settings)
    for name, enum in _ENUMS.items():
        if isinstance(values.get(name), str):
            if values[name] not in enum.__members__:
                raise unknown_name(name, values[name], enum.__members__)
            values[name] = enum[values[name]]
    if isinstance(values.get("data_type"), str):
        types = {name: data_type for name, data_type in vars(data_types).items() if isinstance(data_type, DataType)}
        if values["data_type"] not in types:
            raise unknown_name("data_type", values["data_type"], types)
        values["data_type"] = types[values["data_type"]]
    spec: QTensorConfig = known[kind](**values)
    return spec


def _algorithm(name: str, settings: Mapping[str, Any], logger: logging.Logger) -> AlgoConfig:
    if name not in ALGORITHMS:
        raise unknown_name("algorithm", name, ALGORITHMS)
    values = dict(settings)
    if _JOINT_KEY in values:
        values["num_iterations"], values["learning_rate"] = values.pop(_JOINT_KEY)
    if any(str(values.get(key, "cpu")) != "cpu" for key in _DEVICES):
        text = next(str(values[key]) for key in _DEVICES if str(values.get(key, "cpu")) != "cpu")
        if not usable_devices(text, logger)[0]:
            values = {key: value for key, value in values.items() if key not in _DEVICES}
    return ALGORITHMS[name](**values)
