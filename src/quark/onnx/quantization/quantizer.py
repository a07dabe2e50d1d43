"""The two ways in: `quantize` for most, `ModelQuantizer` for code written for it."""

from __future__ import annotations

import html
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import onnx
import onnx_ir as ir

from quark.account import FileFacts, PackingFacts, Report
from quark.compare import Verdict, worst_text
from quark.errors import InvalidValueError
from quark.measures import Measure, MeasureResult
from quark.onnx.data import Preprocessing
from quark.onnx.data.sources import read_reader
from quark.onnx.growth import growth
from quark.onnx.large_tensors import Message, split
from quark.onnx.pack import pack_message
from quark.onnx.quant_utils import CalibrationDataReader
from quark.onnx.quantization.config.algorithm import AlgoConfig
from quark.onnx.quantization.config.config import Config, QConfig, QuantizationConfig
from quark.onnx.quantization.config.options import settings_of, with_algorithms
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.making import placed
from quark.onnx.quantization.pipeline import Outcome, quantize_graph
from quark.onnx.quantization.targets import PORTABLE, Target, usual_config
from quark.onnx.save import SaveOptions, check_output, together, write_model, write_text
from quark.onnx.settings import Settings
from quark.plan import QuantizationPlan
from quark.report.summary import print_summary, summary_text
from quark.text import get_logger, silent

Source: TypeAlias = str | os.PathLike[str] | onnx.ModelProto | bytes
# a path, an array, arrays by input, or any iterable of samples, such as a list of dicts or a torch DataLoader
CalibrationData: TypeAlias = (
    str | os.PathLike[str] | np.ndarray[Any, Any] | Mapping[str, Any] | Iterable[Any] | CalibrationDataReader
)
ConfigSource: TypeAlias = str | os.PathLike[str] | QuantizationConfig | QConfig | Config

AUTO = "auto"  # the name of the configuration that is searched for

logger = get_logger(__name__)


class QuantizedModel:
    """A quantized model with the report on how it was made.

    The weights of a large model are not in memory: `save` computes and writes them one by one, and only `model` loads
    them all.
    """

    def __init__(
        self,
        outcome: Outcome,
        save_options: SaveOptions,
        source: Source | None,
        data: Any = None,
        reads: Iterable[Any] = (),
        pack: str | None = None,
    ) -> None:
        """`source`, `data` and `reads` are what was read. Those that are files are never overwritten. `pack` is how
        weights are packed unless `save` is told otherwise."""
        self._pack = pack
        self._outcome = outcome
        self._save_options = save_options
        self._source, self._data = _path(source), _path(data)  # arrays are not held
        self._reads = tuple(path for read in reads if (path := _path(read)) is not None)
        self._card = outcome.card
        self._model: onnx.ModelProto | None = None
        self._written: FileFacts | None = None
        self._packing: PackingFacts | None = None
        self._growth: tuple[str, ...] = ()  # the reason why the file is larger than the float file, if it is

    @property
    def model(self) -> onnx.ModelProto:
        """The model with its weights. `save` includes edits made in place."""
        if self._model is None:
            self._model = self._outcome.message.filled()
            self._outcome.check_unchanged()
            self._outcome = replace(self._outcome, files=())  # all weights are in memory now
        return self._model

    @property
    def report(self) -> Report:
        """The report on what was done, why, and how good the result is. May wait for the hash of a large source."""
        card = self._card.to_dict()
        report = self._outcome.report
        remarks = (*self._growth, *report.remarks)
        return replace(report, result=self._written, packing=self._packing, card=card, remarks=remarks)

    def with_search(self, auto: Mapping[str, Any], measure: MeasureResult | None) -> QuantizedModel:
        """The same model, with the configurations that were tried and what was measured in its report."""
        account = replace(self._outcome.account, auto=auto, measure=measure)
        outcome = replace(self._outcome, account=account)
        return QuantizedModel(outcome, self._save_options, self._source, self._data, self._reads, self._pack)

    def summary(self, columns: int = 80) -> str:
        """Return the summary as text: the verdict, what was quantized and how, and how close the outputs are."""
        return summary_text(self.report, columns)

    def __repr__(self) -> str:
        return self.summary().rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the summary for a notebook."""
        return f"<pre>{html.escape(self.summary(100))}</pre>"

    @property
    def plan(self) -> QuantizationPlan:
        """The formats, scales and readers of all quantized tensors."""
        return self._outcome.account.plan

    def save(self, path: str | os.PathLike[str], pack: str | bool | None = None) -> Path:
        """Write the model, and the report as JSON beside it: model.onnx and model.json. The report has the card from
        which `quark reproduce` builds the file again.

        `pack` stores weights of block formats in their true width: True or 'portable', 'custom' or 'native', see
        docs/packed_files.md. If nothing can be packed, because integers already are, the log says so. None packs if
        the target was 'size', and False never does.
        """
        if pack is None:
            pack = self._pack
        elif isinstance(pack, bool):
            pack = PORTABLE if pack else None
        target = check_output(path, self._source, self._data, *self._reads)
        self._outcome.check_unchanged()
        content = self._outcome.message if self._model is None else self._model
        self._packing = None
        if pack is not None:
            message = content if isinstance(content, Message) else split(ir.serde.deserialize_model(content))
            packed, facts = pack_message(message, pack)
            for remark in facts.remarks:
                logger.warning("%s", remark)
            if facts.packed:
                content = packed
                self._packing = PackingFacts(facts.profile, len(facts.packed), facts.bits_per_weight)
        with together(target):
            self._written = write_model(content, target, self._save_options)
            self._outcome.check_unchanged()
            card = replace(self._outcome.card, packing=self._packing.profile if self._packing else "")
            self._card = placed(card, target, self._source, self._data, self._written)
            self._note_growth(content.proto if isinstance(content, Message) else content)
            write_text(self.report.to_json(), target.with_suffix(".json"))
        return target

    def _note_growth(self, proto: onnx.ModelProto) -> None:
        assert self._written is not None
        remark = growth(self._written, self._outcome.account.source, proto)
        self._growth = () if remark is None else (remark.text,)
        if remark is not None:
            logger.log(logging.INFO if remark.is_by_design else logging.WARNING, "%s", remark.text)


def quantize(  # noqa: PLR0913 - options of the public interface, by keyword
    model: Source,
    data: CalibrationData | None = None,
    config: ConfigSource | None = None,
    *,
    target: str | None = None,
    transform: Callable[[Any], Any] | None = None,
    num_samples: int | None = None,
    batch_size: int = 1,
    preprocessing: str | Path | Preprocessing = "auto",
    metric: str | Measure | Callable[[Any], Any] | None = None,
    use_random_data: bool = False,
) -> QuantizedModel:
    """Quantize a model: `quantize("in.onnx", images).save("out.onnx")`.

    `data` is what the model will see: an ONNX Runtime reader, any iterable of dicts or arrays, a torch DataLoader, an
    array, a .npz file or a folder of images. A configuration that needs calibration is refused without data, unless
    `use_random_data` is True or the configuration has the option UseRandomData; ranges found on random numbers are
    meaningless, and the report says so.

    `transform` is applied to each item of `data` before it is used: `transform=lambda batch: batch["pixel_values"]`
    for a loader whose batches hold more than the model reads.

    `config` is the name of a preset, a YAML or JSON file, or a configuration object. Without one, `target` and the
    kind of network choose it: 'cpu' (the default), 'npu', 'gpu' or 'size', see `quark.onnx.quantization.targets`.
    'auto' tries several presets and takes the best for the target whose outputs are close enough to the float model's:
    `auto_quantize` has more options.

    `num_samples` limits the samples, also where `data` comes in batches: to that many images of a folder, evenly
    spaced, or to the first ones. Images are read in batches of `batch_size`, by `preprocessing`: 'imagenet', 'unit',
    'letterbox' or another name of `quark.onnx.data.images.PRESETS`, a YAML file or a `Preprocessing`. 'auto' takes
    what the shape of the input tells, and is an error if that is too little.

    `metric` is measured on both models, for `report.measure`: the name of a built-in measure (`quark.measures`), which
    compares them on the held-out samples, 'FILE.py:FUNCTION', or a function that takes an ONNX Runtime session and
    returns a number.
    """
    if data is not None and use_random_data:
        raise InvalidValueError("data and use_random_data: give one of them")
    if target is not None and config is not None and config != AUTO:
        raise InvalidValueError(
            f"config {config!r} and target {target!r}: a target chooses the config; give one of them"
        )
    if transform is not None:
        data = _transformed(data, transform)
    if isinstance(config, str) and config == AUTO:
        # imported by name: quark.search lies right of quark.onnx
        auto_quantize = import_module("quark.search").auto_quantize
        result = auto_quantize(
            *(model, data),
            target=Target.of(target or Target.CPU).value,
            metric=metric,
            num_samples=num_samples,
            batch_size=batch_size,
            preprocessing=preprocessing,
        )
        if result.model is None:
            raise InvalidValueError(f"config 'auto': {result.statement}")
        return cast(QuantizedModel, result.model)
    pack, chosen_by = None, ""
    if config is None:
        usual = usual_config(target or Target.CPU, model)
        settings, pack, chosen_by = settings_of(usual.config()), usual.pack, usual.reason
        settings = replace(settings, name=usual.name)
    else:
        settings = settings_of(config)
    measure = None if metric is None else Measure.of(metric)
    source = Data(data, num_samples, batch_size, preprocessing, use_random_data)
    outcome = quantize_graph(model, source, settings, measure)
    outcome = replace(outcome, account=replace(outcome.account, chosen_by=chosen_by))
    _warn(outcome.account)
    reads = files_read(settings, config, preprocessing, metric)
    return QuantizedModel(outcome, settings.save, model, data, reads, pack)


def _transformed(data: Any, transform: Callable[[Any], Any]) -> Iterator[Any]:
    """The items of the data after `transform`. Paths and whole arrays have no items that a function could take."""
    if data is None or isinstance(data, (str, os.PathLike, Mapping, np.ndarray)):
        what = "no data" if data is None else f"data of type {type(data).__name__}"
        raise InvalidValueError(
            f"transform with {what}: it is for data that is read item by item, such as a DataLoader, a list or a reader"
        )
    return map(transform, read_reader(data) if callable(getattr(data, "get_next", None)) else data)


class ModelQuantizer:
    """Quantizes models with one configuration, which is checked at construction.

    >>> from quark.onnx import QConfig
    >>> ModelQuantizer(QConfig.get_default_config("MXINT8")).settings.name
    'MXINT8'
    """

    def __init__(self, config: Any) -> None:
        self.config = config
        self.settings: Settings = settings_of(config)

    def quantize_model(
        self,
        model_input: Source,
        model_output: str | os.PathLike[str] | None = None,
        calibration_data_reader: Any = ...,
        calibration_data_path: str | os.PathLike[str] | None = None,
        algorithms: Sequence[AlgoConfig] | None = None,
    ) -> onnx.ModelProto | None:
        """Quantize a model. With an output path the file is written there, and the report beside it as JSON; without
        one, the quantized model is returned. A summary is printed unless `print_summary` is False.

        A configuration that needs calibration is refused without data. `calibration_data_reader=None` asks for random
        numbers, and so does the option UseRandomData. With `crypto_mode` the model comes from memory and is returned,
        whatever `model_output` says; nothing is written, logged or printed.

        `algorithms` are accuracy algorithms beside those of a QuantizationConfig; a QConfig has them in `algo_config`.
        """
        settings = with_algorithms(self.config, algorithms) if algorithms else self.settings
        is_random = calibration_data_reader is None
        reader = None if calibration_data_reader is ... else calibration_data_reader
        if reader is not None and calibration_data_path is not None:
            raise InvalidValueError("calibration_data_reader and calibration_data_path: give one of them")
        data = reader if calibration_data_path is None else Path(calibration_data_path)
        if settings.save.is_in_memory:
            return _in_memory(model_input, Data(data, is_random=is_random), settings)
        reads = files_read(settings)
        target = None if model_output is None else check_output(model_output, model_input, data, *reads)
        outcome = quantize_graph(model_input, Data(data, is_random=is_random), settings)
        result = QuantizedModel(outcome, settings.save, model_input, data, reads)
        if target is not None:
            result.save(target)
        _warn(outcome.account)
        if settings.has_summary:
            print_summary(result.report)
        return None if target is not None else result.model


def _in_memory(model_input: Source, data: Data, settings: Settings) -> onnx.ModelProto:
    """Quantize in crypto_mode."""
    if not isinstance(model_input, (onnx.ModelProto, bytes)):
        raise InvalidValueError(f"crypto_mode with the file '{model_input}': give the model itself, an onnx.ModelProto")
    with silent():
        return QuantizedModel(quantize_graph(model_input, data, settings), settings.save, model_input).model


def files_read(settings: Settings, config: Any = None, preprocessing: Any = None, metric: Any = None) -> list[str]:
    """The files other than model and data that a run with these arguments reads."""
    mix, finetune = settings.mix, settings.refine.finetune
    named = [] if mix is None else [mix.plan_file, mix.subgraphs, mix.cache_file]
    named += [] if finetune is None else [finetune.reference]
    function = metric.rpartition(":")[0] if isinstance(metric, str) else None  # FILE.py:FUNCTION
    paths = [_path(file) for file in (config, preprocessing, *named, function)]
    ranges = settings.calibrate.ranges_file  # written as well, and may not exist yet
    given = [os.fspath(path) for path in paths if path is not None and os.path.isfile(path)]
    return [*given, *([] if ranges is None else [os.fspath(ranges)])]


def _path(source: Any) -> str | os.PathLike[str] | None:
    return source if isinstance(source, (str, os.PathLike)) else None


def _warn(report: Report) -> None:
    """Log what a user must not miss, even if no summary is printed."""
    for remark in report.remarks:
        logger.warning("%s", remark)
    if report.verdict in (Verdict.DEGRADED, Verdict.COLLAPSED):
        verdict = f"{report.verdict.value} ({worst_text(report.outputs)})"
        logger.warning("%s as %s: %s", report.source.name, report.config_name, verdict)
