"""AutoSearch: try the combinations of a space on top of a config, and keep the models that are close enough to float.

search = AutoSearch("model.onnx", Config(get_default_config("S8S8_AAWS")), settings, calibration_data_reader=reader)
candidates = search.search_model()      # [{"config_index": 3, "difference": 0.01, "model_path": ".../iter_3.onnx"}]
"""

from __future__ import annotations

import copy
import importlib
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from quark.errors import InvalidValueError, UnsupportedOptionError, UnsupportedTypeError, unknown_name
from quark.files.output import writing
from quark.onnx.data import CachedDataReader, PathDataReader
from quark.onnx.quantization.config.config import Config, QuantizationConfig
from quark.onnx.quantization.config.quant_types import (
    CalibrationMethod,
    LayerWiseMethod,
    PowerOfTwoMethod,
    QuantType,
)
from quark.onnx.quantization.quantizer import ModelQuantizer
from quark.search.distances import BEST, METRICS, FloatOutputs, SpareReader, feeds
from quark.search.samplers import SAMPLERS, nested, sampler_named
from quark.search.spaces import (
    FINETUNE_KEY,
    JOINT_KEY,
    OPTIONS_KEY,
    ConfigGrid,
    SearchSpace,
    joined_levels,
    space_of,
    split_config_levels,
)
from quark.text import get_logger

_LOG_NAME = "auto_search"
_ITERATIONS, _RATE = "NumIterations", "LearningRate"
_STEP = 1000  # step of iterations, if the range is wide enough


def logger_config(log_path: str = "./auto_search.log", logging_name: str = "auto search") -> logging.Logger:
    """Return a logger that also writes to a file."""
    logger = get_logger(logging_name)
    logger.setLevel(logging.INFO)
    target = os.path.abspath(log_path)
    files = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
    if not any(file.baseFilename == target for file in files):
        with writing(log_path):
            logger.addHandler(logging.FileHandler(target, encoding="utf-8"))
    return logger


@contextmanager
def log_file(logger: logging.Logger, path: str | os.PathLike[str]) -> Iterator[None]:
    """Write the messages of a logger to a file, inside the with block."""
    before = (logger.level, list(logger.handlers))
    logger_config(os.fspath(path), logger.name)
    try:
        yield
    finally:
        logger.setLevel(before[0])
        for handler in [handler for handler in logger.handlers if handler not in before[1]]:
            logger.removeHandler(handler)
            handler.close()


class AutoSearchConfig:
    """The settings of a search; a class or an object with some of these attributes will do.

    search_space              lists of values by field, extra option and setting of FastFinetune
    search_metric             'L2', 'L1', 'cos', 'psnr' or 'ssim': how outputs are compared with float's
    search_evaluator          instead of a metric, a function of a model's path that returns a number; higher is better
    search_metric_tolerance   largest distance from float of a model that is kept. The distance is 1 - cos, 1 - ssim or
                              100 - psnr; for an evaluator, its value for float minus that for the model
    search_algo               'grid_search', in order, or 'random'
    search_cache_dir          folder for the outputs of the float model during the search
    search_output_dir         folder for the models that are kept
    search_log_path           the log
    two_stage_search          search calibration first, then finetuning on top of the best result
    advanced_fastft_search    sample NumIterations and LearningRate between their extremes in search_space, by
                              `advanced_fastft_params`: sampler_algo, direction, n_trials
    search_devices            devices to finetune on, used in turn: 'cpu' or 'cuda:0,1'. Missing devices are skipped
                              with a warning
    n_jobs                    has no effect: each quantization uses all processors, so trials run one at a time
    search_stop_condition     find_n_candidates, iteration_limit, time_limit in seconds; -1: no limit
    """

    search_space: dict[str, Any] = {  # noqa: RUF012 - scripts set these on the class as well as on objects
        "calibrate_method": [
            PowerOfTwoMethod.MinMSE,
            PowerOfTwoMethod.NonOverflow,
            CalibrationMethod.MinMax,
            CalibrationMethod.Entropy,
            CalibrationMethod.Percentile,
            LayerWiseMethod.LayerWisePercentile,
        ],
        "activation_type": [QuantType.QInt8, QuantType.QInt16],
        "weight_type": [QuantType.QInt8, QuantType.QInt16],
        "include_cle": [True, False],
        "include_auto_mp": [False, True],
        "include_fast_ft": [False, True],
        "include_sq": [False, True],
        "extra_options": {
            "ActivationSymmetric": [True, False],
            "WeightSymmetric": [True, False],
            "CalibMovingAverage": [True, False],
            "CalibMovingAverageConstant": [0.01, 0.001],
            "Percentile": [99.99, 99.999],
            "SmoothAlpha": [0.5, 0.6],
            "FastFinetune": {
                "DataSize": [500, 1000],
                "NumIterations": [100, 1000],
                "OptimAlgorithm": ["adaround", "adaquant"],
                "LearningRate": [0.01, 0.001, 0.0001],
                "FixedSeed": [42],
            },
        },
    }
    search_metric: str = "L2"
    search_algo: str = "grid_search"
    search_evaluator: Callable[[str], float] | None = None
    search_metric_tolerance: float = 2.00e4
    search_cache_dir: str = "./"
    search_output_dir: str = "./"
    search_log_path: str = "./auto_search.log"
    two_stage_search: bool = False
    advanced_fastft_search: bool = False
    advanced_fastft_params: dict[str, Any] = {  # noqa: RUF012
        "sampler_algo": "TPE",
        "direction": "minimize",
        "n_trials": 10,
    }
    n_jobs: int = 2
    search_devices: str = "cuda:0,1"
    search_stop_condition: dict[str, Any] = {  # noqa: RUF012
        "find_n_candidates": 1e3,
        "find_best_candidate": -1,
        "iteration_limit": 1e5,
        "time_limit": 30 * 24 * 3600,
    }

    def __init__(self) -> None:
        for name in ("search_space", "advanced_fastft_params", "search_stop_condition"):
            setattr(self, name, copy.deepcopy(getattr(type(self), name)))  # editing one changes no other


def _settings(given: Any) -> SimpleNamespace:
    """Return all settings, with defaults for those that are missing or None."""
    names = [name for name in vars(AutoSearchConfig) if not name.startswith("_")]
    values = {name: getattr(given, name, None) for name in names}
    usual = {name: copy.deepcopy(getattr(AutoSearchConfig, name)) for name in names}
    return SimpleNamespace(**{name: usual[name] if value is None else value for name, value in values.items()})


class _Shuffled(Sequence[dict[str, Any]]):
    """The same configs in another order."""

    def __init__(self, configs: Sequence[dict[str, Any]], order: Sequence[int]) -> None:
        self._configs, self._order = configs, order

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._configs[i] for i in self._order[index]]
        return self._configs[self._order[index]]


class AutoSearch:
    """A search over the combinations of a space, see `AutoSearchConfig`.

    `all_configs` may be replaced before `search_model`, by what `build_all_configs` returns for other spaces.
    `searched_space` maps the number of a config to its distance, and `failures` to the reason why it failed.
    """

    def __init__(
        self,
        model_input: str | os.PathLike[str],
        config: Config,
        auto_search_config: Any = None,
        eval_dataloader: Any = None,
        calibration_data_reader: Any = None,
        calibration_data_path: str | os.PathLike[str] | None = None,
    ) -> None:
        base = config.whole() if isinstance(config, Config) else config
        if not isinstance(base, QuantizationConfig):
            raise UnsupportedTypeError(f"config: expected a Config, got {type(config).__name__}")
        if base.crypto_mode:
            raise UnsupportedOptionError("crypto_mode with AutoSearch: models are not encrypted; leave it out")
        if not isinstance(model_input, (str, os.PathLike)):
            raise UnsupportedTypeError(f"model_input: expected a path, got {type(model_input).__name__}")
        if calibration_data_reader is None and calibration_data_path is not None:
            calibration_data_reader = PathDataReader(os.fspath(model_input), os.fspath(calibration_data_path))
        if calibration_data_reader is None:
            raise InvalidValueError("AutoSearch needs data: give calibration_data_reader or calibration_data_path")
        self.config = config
        self.model_input = os.fspath(model_input)
        self.auto_search_config = _settings(auto_search_config)
        self.calibration_data_reader = CachedDataReader(calibration_data_reader)
        self.calibration_data_path = calibration_data_path
        self.eval_dataloader = self.calibration_data_reader if eval_dataloader is None else eval_dataloader
        self.logger = get_logger(_LOG_NAME)
        self.cache_dir = str(self.auto_search_config.search_cache_dir)
        self.output_dir = str(self.auto_search_config.search_output_dir)
        self._metric_name = self.auto_search_config.search_metric
        if self._metric_name not in METRICS:
            self.logger.warning(
                "search_metric '%s' is not one of %s: L2 is used", self._metric_name, ", ".join(METRICS)
            )
            self._metric_name = "L2"
        self.metric = METRICS[self._metric_name]
        self.evaluator = self.auto_search_config.search_evaluator
        self.all_configs: Sequence[dict[str, Any]] = self.build_all_configs(self.auto_search_config.search_space)
        self._base = base
        self._float: FloatOutputs | None = None
        self._float_value = 0.0
        self.iterations = 0
        self.time_consumed = 0.0
        self.searched_space: dict[int, float] = {}
        self.failures: dict[int, str] = {}
        self.candidates: list[dict[str, Any]] = []

    @property
    def best_candidate(self) -> dict[str, Any] | None:
        """The candidate with the least distance."""
        return min(self.candidates, key=lambda candidate: float(candidate["difference"]), default=None)

    def build_all_configs(self, search_space_config: Mapping[str, Any]) -> Sequence[dict[str, Any]]:
        """Return the combinations of a space; several can be added to each other."""
        if "crypto_mode" in search_space_config:
            raise UnsupportedOptionError("crypto_mode in a search space: models are not encrypted; leave it out")
        return SearchSpace(search_space_config, self.logger).get_all_configs()

    def sampler(self, input_idxs: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Return configs in the order in which they are tried; 'random' is the same order every time."""
        if self.auto_search_config.search_algo == "random":
            return _Shuffled(input_idxs, random.Random(0).sample(range(len(input_idxs)), len(input_idxs)))
        if self.auto_search_config.search_algo != "grid_search":
            name = self.auto_search_config.search_algo
            self.logger.warning("search_algo '%s' is not 'grid_search' or 'random': grid_search is used", name)
        return input_idxs

    def search_model(self) -> Any:
        """Search, and return the candidates within the tolerance. A two-stage search returns a list with the best
        config, and an advanced_fastft_search its best settings."""
        settings = self.auto_search_config
        with log_file(self.logger, settings.search_log_path):
            for folder in (self.cache_dir, self.output_dir):
                with writing(folder):
                    os.makedirs(folder, exist_ok=True)
            if settings.n_jobs > 1:
                self.logger.info("n_jobs %d: trials run one at a time, since each uses all processors", settings.n_jobs)
            self._measure_float()
            try:
                if settings.two_stage_search:
                    if self.include_two_stage_config():
                        return [self.two_stage_search()]
                    self.logger.warning(
                        "two_stage_search: the space does not have settings for both stages, so it is searched in one"
                    )
                if settings.advanced_fastft_search:
                    return self.fastft_search()
                self._try_all(self.sampler(self.all_configs))
                self._log_result()
                return self.candidates
            finally:
                if self._float is not None:
                    self._float.remove()

    def _measure_float(self) -> None:
        if self.evaluator is not None:
            self._float_value = float(self.evaluator(self.model_input))
            self.logger.info("float model: %g", self._float_value)
            return
        samples = feeds(self.model_input, self.eval_dataloader)
        providers = tuple(self._base.execution_providers or ("CPUExecutionProvider",))
        self._float = FloatOutputs(samples, Path(self.cache_dir) / "fp_model_output", providers)
        self._float.measure(self.model_input)

    def _try_all(self, configs: Sequence[dict[str, Any]]) -> None:
        limits = {name: float(value) for name, value in self.auto_search_config.search_stop_condition.items()}
        limits = {name: math.inf if value == -1 else value for name, value in limits.items()}
        for config in configs:
            self.runner(config)
            if len(self.candidates) >= limits.get("find_n_candidates", math.inf):
                break
            if self.iterations >= limits.get("iteration_limit", math.inf):
                break
            if self.time_consumed >= limits.get("time_limit", math.inf):
                break
        self._raise_if_all_failed()

    def _raise_if_all_failed(self) -> None:
        if self.failures and not self.searched_space:
            first = next(iter(self.failures.values()))
            raise InvalidValueError(f"AutoSearch: none of {len(self.failures)} configs could be quantized. {first}")

    def runner(self, one_config: Mapping[str, Any]) -> float:
        """Quantize with one config, keep the model if it is close enough, and return its distance from float; infinite
        if it failed."""
        number = self.iterations
        self.iterations += 1
        self.logger.info("config %d: %s", number, one_config)
        path = Path(self.output_dir) / f"iter_{number}.onnx"
        start = time.perf_counter()
        is_written = False
        try:
            config = self.applied(one_config)
            reader = SpareReader(self.calibration_data_reader)
            config.extra_options["CalibDataSize"] = reader.limit(config.extra_options.get("CalibDataSize"))
            ModelQuantizer(config).quantize_model(self.model_input, path, reader)
            is_written = True
            self.time_consumed += time.perf_counter() - start
            difference = self._difference(path)
        except Exception as error:  # noqa: BLE001 - one config of many: the log and `failures` have the reason
            self.failures[number] = " ".join(str(error).split())
            self.logger.warning("config %d failed: %s", number, self.failures[number])
            if is_written:
                _remove(path)
            return math.inf
        tolerance = self.auto_search_config.search_metric_tolerance
        self.logger.info("config %d: distance %g from float, tolerance %g", number, difference, tolerance)
        self.searched_space[number] = difference
        if difference <= tolerance:
            candidate = {"config_index": number, "difference": difference, "model_path": str(path)}
            self.candidates.append(candidate)
        else:
            _remove(path)
        return difference

    def applied(self, one_config: Mapping[str, Any]) -> QuantizationConfig:
        """Return the config of the search with the settings of a combination."""
        fields, options, finetuning = split_config_levels(one_config)
        if JOINT_KEY in finetuning:
            finetuning[_ITERATIONS], finetuning[_RATE] = finetuning.pop(JOINT_KEY)
        known = QuantizationConfig.__dataclass_fields__
        for name in fields:
            if name not in known:
                raise unknown_name("field of QuantizationConfig", name, known)
        base = copy.deepcopy(self._base)
        extra = {**base.extra_options, **options}
        if finetuning:
            extra[FINETUNE_KEY] = {**extra.get(FINETUNE_KEY, {}), **finetuning}
        return replace(base, **{**fields, OPTIONS_KEY: extra, "print_summary": False})

    def _difference(self, path: Path) -> float:
        if self.evaluator is not None:
            value = float(self.evaluator(str(path)))
            self.logger.info("evaluator: %g", value)
            return self._float_value - value
        assert self._float is not None
        value = self._float.distance(path, self.metric)
        return BEST[self._metric_name] - value if self._metric_name in BEST else value

    def include_two_stage_config(self) -> bool:
        """True if the space has settings of finetuning, and others."""
        configs = self.all_configs
        sample = [configs[0]] if isinstance(configs, ConfigGrid) else configs  # all have the same keys
        levels = [split_config_levels(config) for config in sample]
        return any(level[0] or level[1] for level in levels) and any(level[2] for level in levels)

    def two_stage_search(self) -> dict[str, Any]:
        """Try all configs without finetuning, then all settings of finetuning on the best of them, which is returned.
        There are no limits on the number of configs or the time."""
        stages: tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]] = ({}, {})
        for config in self.all_configs:
            fields, options, finetuning = split_config_levels(config)
            first = joined_levels({**fields, "include_fast_ft": False}, options, {})
            stages[0].setdefault(repr(first), first)
            if finetuning:
                stages[1].setdefault(repr(finetuning), finetuning)
        self.logger.info("two stages: %d configs, then %d of finetuning", len(stages[0]), len(stages[1]))
        best = self._best_of(list(stages[0].values()))
        fields, options, _ = split_config_levels(best)
        fields["include_fast_ft"] = True
        finetuned = self._best_of([joined_levels(fields, options, finetuning) for finetuning in stages[1].values()])
        self.logger.info("two stages: the best is %s", finetuned)
        return finetuned

    def _best_of(self, configs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        distances = [self.runner(config) for config in configs]
        if all(math.isinf(distance) for distance in distances):
            self.searched_space = {}
        self._raise_if_all_failed()
        return configs[min(range(len(configs)), key=lambda i: math.inf if math.isnan(distances[i]) else distances[i])]

    def fastft_search(self) -> dict[str, Any]:
        """Sample NumIterations and LearningRate between the extremes in the space; return the best."""
        fields, options, finetuning = split_config_levels(self.auto_search_config.search_space)
        if fields or options:
            self.logger.warning("advanced_fastft_search: only %s of FastFinetune are searched", (_ITERATIONS, _RATE))
        others = [name for name in finetuning if name not in (_ITERATIONS, _RATE)]
        if others or not finetuning:
            raise UnsupportedOptionError(
                f"advanced_fastft_search: it searches {_ITERATIONS} and {_RATE} of FastFinetune, and the space has "
                f"{', '.join(others) or 'neither'}"
            )
        ranges: dict[str, Any] = {}
        if _ITERATIONS in finetuning:
            low, high = min(finetuning[_ITERATIONS]), max(finetuning[_ITERATIONS])
            ranges[_ITERATIONS] = {"type": "int", "low": low, "high": high, "step": _STEP if high - low >= _STEP else 1}
        if _RATE in finetuning:
            low, high = min(finetuning[_RATE]), max(finetuning[_RATE])
            ranges[_RATE] = {"type": "float", "low": low, "high": high, "log": True}
        params = self.auto_search_config.advanced_fastft_params
        name = params.get("sampler_algo", "TPE")
        if name not in SAMPLERS:
            self.logger.warning("sampler_algo '%s' is not one of %s: TPE is used", name, ", ".join(SAMPLERS))
            name = "TPE"
        is_distance = self.evaluator is None  # a lower distance is better, whatever the metric
        sign = -1 if params.get("direction", "minimize") == "maximize" and not is_distance else 1
        space = space_of(ranges)
        sampler = sampler_named(name, space)
        devices = usable_devices(self.auto_search_config.search_devices, self.logger)
        scores: list[tuple[float, dict[str, Any]]] = []
        for number in range(int(params.get("n_trials", 10))):
            values = sampler.ask()
            settings = {**nested(space, values), **devices[number % len(devices)]}
            score = self.runner({"include_fast_ft": True, OPTIONS_KEY: {FINETUNE_KEY: settings}})
            sampler.tell(values, sign * score if math.isfinite(score) else math.inf)
            scores.append((sign * score if math.isfinite(score) else math.inf, values))
        self._raise_if_all_failed()
        best = min(scores, key=lambda scored: scored[0])[1]
        self.logger.info("best of %d trials: %s", len(scores), best)
        return best

    def _log_result(self) -> None:
        for number, distance in sorted(self.searched_space.items(), key=lambda numbered: (numbered[1], numbered[0])):
            self.logger.info("config %d: distance %g", number, distance)
        if not self.candidates:
            self.logger.warning("no config is within the tolerance: raise search_metric_tolerance, or widen the space")
        for candidate in sorted(self.candidates, key=lambda candidate: float(candidate["difference"])):
            self.logger.info("candidate: %s", candidate)


def usable_devices(text: str, logger: logging.Logger) -> list[dict[str, str]]:
    """Return settings of FastFinetune for each device of 'cpu' or 'cuda:0,1' that torch has here; if it has none of
    them, one without any, which is the CPU."""
    kind, _, numbers = str(text).partition(":")
    if kind == "cpu" or not numbers:
        return [{}]
    cuda = importlib.import_module("torch").cuda
    count = cuda.device_count() if cuda.is_available() else 0
    wanted = [part.strip() for part in numbers.split(",")]
    usable = [number for number in wanted if number.isdigit() and int(number) < count]
    if len(usable) < len(wanted):
        logger.warning(
            "search_devices '%s': torch has %d such devices; finetuning uses %s", text, count, usable or "the CPU"
        )
    return [{"OptimDevice": f"{kind}:{number}"} for number in usable] or [{}]


def _remove(path: Path) -> None:
    """Remove a model with its report and its weights."""
    weights = path.parent.glob(f"{path.stem}-????????????.data")
    for file in (path, path.with_suffix(".json"), *weights):
        file.unlink(missing_ok=True)
