"""Quantize a model from a folder to a folder, with no more of it in memory than two layers.

The model is built without numbers. The embedding and one layer at a time are read, quantized as in memory, written as a
file of their own, and released. Memory holds the hidden states of the calibration data, the layer with its float copy,
and at the ends the embedding or the head.

A folder beside the output, OUTPUT.quark-work, keeps finished files, the hidden states before the next layer and a
fingerprint of the source, the settings and the data. A run that was killed goes on from there, and gives the same bytes
as one that was not. The files are moved into the output when all are finished, config.json last.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import quark
from quark.errors import (
    InvalidValueError,
    MissingDependencyError,
    ModelError,
    OutputError,
    QuarkError,
    UnsupportedOptionError,
)
from quark.features.order import call
from quark.files.foreign import RECORD, Fields, read_bytes, read_json
from quark.files.output import is_same_file, locked, move, writing
from quark.onnx.progress import track
from quark.onnx.session import release_memory
from quark.text import get_logger
from quark.torch.language.architecture import Architecture, all_linears, find_architecture
from quark.torch.language.branches import NAMES as BRANCHES
from quark.torch.language.checkpoint import (
    CONFIG,
    INDEX,
    Checkpoint,
    companions_of,
    shard_name,
    write_bytes,
    write_json,
    write_shard,
)
from quark.torch.language.file_configs import FileTypes, KvTypes, layer_record, read_layer_record
from quark.torch.language.pipeline import (
    LayerWork,
    ModelWork,
    check_settings,
    follows_float,
    head_work,
    layers_path,
    quantize_layer,
    spec_of,
)
from quark.torch.language.saving import Parts, check_layout, describe, parameters_on_meta, remove_stale
from quark.torch.language.streams import Streams, batches_of, start_streams
from quark.torch.language.weight_layouts import WeightLayout
from quark.torch.specs import Settings

WORK_SUFFIX = ".quark-work"
STATE = "state.json"
_HIDDEN = re.compile(r"hidden-\d{5}\.safetensors")
_VERSION = 1
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_LOG = get_logger(__name__)


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    settings: Settings,
    data: Iterable[Any] | None,
    layout: WeightLayout,
    device: str | torch.device = "cpu",
) -> None:
    """Quantize the model in the folder `source` by the settings, and write it into the folder `target`."""
    checkpoint, output = Checkpoint(source), Path(target)
    if checkpoint.config().has("quantization_config"):
        raise ModelError(f"'{checkpoint.folder}' is quantized already: expected a model with float weights")
    if is_same_file(checkpoint.folder, output):
        raise InvalidValueError(f"output '{output}' is the folder that is read: choose another one")
    if needs_whole_model(settings):
        raise UnsupportedOptionError(
            "algo_config asks for rotation, which changes the whole model before the first layer, and this one is read "
            "layer by layer; load it and use quantize_model"
        )
    if output.exists() and not output.is_dir():
        raise OutputError(f"'{output}' is a file: expected a folder to write to, or a name that is still free")
    source_model = _SourceModel.open(checkpoint, torch.device(device), layers_path(settings))
    check_settings(source_model.model, source_model.architecture, settings, has_data=data is not None)
    check_layout(source_model.model, source_model.architecture, settings, layout)
    batches = None if data is None else list(batches_of(data))
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
    with locked(output):
        run = _Run(source_model, output, settings, layout, batches)
        run.quantize()
        run.finish()


class OtherNamesError(ModelError):
    """A folder lacks tensors of the model, or has them under names that transformers translates when it loads them."""


def has_other_names(folder: str | os.PathLike[str]) -> bool:
    """True if a folder cannot be read layer by layer, since its tensors have other names than those of the model."""
    try:
        _SourceModel.open(Checkpoint(folder), torch.device("cpu"), "")
    except OtherNamesError as error:
        _LOG.info("%s. The model is loaded as a whole", error)
        return True
    return False


def needs_whole_model(settings: Settings) -> bool:
    """True if a feature changes all layers before the first one is quantized, so that the model cannot be streamed."""
    return settings.options_of("rotation") is not None


@dataclass(eq=False)
class _SourceModel:
    """A model whose parameters are read from a folder when they are needed."""

    checkpoint: Checkpoint
    model: nn.Module
    architecture: Architecture
    dtype: torch.dtype
    device: torch.device
    stored: Mapping[str, str]  # names of the model -> names in the folder

    @staticmethod
    def open(checkpoint: Checkpoint, device: torch.device, layers: str) -> _SourceModel:
        """Build the model without numbers, and find its parameters in the folder. `layers` as in find_architecture."""
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise MissingDependencyError("transformers is not installed: pip install transformers") from error
        try:
            config = transformers.AutoConfig.from_pretrained(
                checkpoint.folder, local_files_only=True, trust_remote_code=False
            )
            with parameters_on_meta():
                model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except Exception as error:  # config.json may contain anything, and transformers may raise anything for it
            raise ModelError(f"'{checkpoint.folder}' is not a model that transformers knows: {error}") from error
        named = str(getattr(config, "dtype", None) or "").removeprefix("torch.")
        floats = [entry.dtype for entry in checkpoint.entries.values() if entry.dtype in _DTYPES.values()]
        dtype = _DTYPES.get(named) or next(iter(floats), torch.float32)
        assert dtype is not None
        architecture = find_architecture(model, layers)
        stored = _names(checkpoint, model, architecture)
        model.eval().requires_grad_(False)
        for module in model.modules():
            module._buffers.update({k: v.to(device) for k, v in module._buffers.items() if v is not None})
        return _SourceModel(checkpoint, model, architecture, dtype, device, stored)

    def outside(self) -> list[str]:
        """Paths of the modules with parameters that belong to no layer and are not the head."""
        parts = self.architecture
        return [
            path
            for path, module in self.model.named_modules()
            if not path.startswith(f"{parts.layers}.") and path != parts.head and len(module._parameters)
        ]

    def fill(self, paths: Iterable[str]) -> None:
        """Read the parameters and buffers of these modules that are not there yet."""
        for top in paths:
            names = self._missing(top)
            read = self.checkpoint.read(self.stored[name] for name in names)
            for name in names:
                path, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(path)
                value = read[self.stored[name]]
                value = value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)
                if leaf in module._parameters:
                    module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
                else:
                    module._buffers[leaf] = value

    def _missing(self, top: str) -> list[str]:
        missing = []
        for path, module in self.model.get_submodule(top).named_modules():
            buffers = {k: v for k, v in module._buffers.items() if k not in module._non_persistent_buffers_set}
            for leaf, value in {**module._parameters, **buffers}.items():
                name = ".".join(part for part in (top, path, leaf) if part)
                if value is not None and (value.device.type == "meta" or leaf in buffers):
                    missing.append(name)
        return missing

    def release(self, paths: Iterable[str]) -> None:
        """Forget the parameters of these modules."""
        for path in paths:
            self.model.get_submodule(path).to("meta")


def _names(checkpoint: Checkpoint, model: nn.Module, architecture: Architecture) -> dict[str, str]:
    """The place of each tensor of the model in the folder; with or without the name of the inner model before it."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names = {}
    for name, value in model.state_dict().items():
        tied = (
            f"{architecture.embedding}.weight" if architecture.is_tied and name == f"{architecture.head}.weight" else ""
        )
        candidates = (name, name.removeprefix(prefix), tied, tied.removeprefix(prefix))
        stored = next((candidate for candidate in candidates if candidate in checkpoint.entries), None)
        if stored is None:
            raise OtherNamesError(
                f"'{checkpoint.folder}' has no tensor '{name}', which {type(model).__name__} has: expected all weights "
                "of the model, under the names that it has in transformers; if transformers loads the folder, "
                "quantize_model and export_safetensors do"
            )
        checkpoint.check(stored, None if value.is_floating_point() else value.dtype, tuple(value.shape))
        names[name] = stored
    strange = sorted(checkpoint.entries.keys() - set(names.values()))
    if strange:
        _LOG.warning("%d tensors of the source are not in the model, such as '%s': left out", len(strange), strange[0])
    return names


@dataclass(eq=False)
class _Run:
    """One output, and what is finished of it. Its files are the layers, the head if it has numbers of its own, and the
    rest."""

    source: _SourceModel
    output: Path
    settings: Settings
    layout: WeightLayout
    batches: Sequence[Mapping[str, Any]] | None
    done: int = 0  # files that are finished
    layers: dict[str, Any] = field(default_factory=dict)  # records of the types of quantized linear layers
    kv_cache: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)  # the index
    size: int = 0

    def __post_init__(self) -> None:
        self.work = self.output.parent / f"{self.output.name}{WORK_SUFFIX}"
        self.fingerprint = _fingerprint(self)
        model = self.source.model
        self.linears = list(all_linears(model))
        self.parts = Parts(model, self.source.architecture, self.layout)
        with self._trusting_work():
            self._resume()

    @property
    def _has_head(self) -> bool:
        """True if the head has numbers that are not the embedding's."""
        parts = self.source.architecture
        return parts.head is not None and not (parts.is_tied and spec_of(self.settings, parts.head) is None)

    @property
    def _count(self) -> int:
        return self.source.architecture.count + self._has_head + 1

    # ---- what is finished
    @contextmanager
    def _trusting_work(self) -> Iterator[None]:
        """Say what to do if the folder of finished files is not as it was left."""
        try:
            yield
        except QuarkError as error:
            raise ModelError(f"{error}; remove '{self.work}' to start from the first layer") from error

    def _resume(self) -> None:
        path = self.work / STATE
        if not path.exists():
            return
        label = f"'{path}'"
        state = Fields(read_json(path, label, RECORD), label)
        if not state.has("fingerprint") or state.value("fingerprint") != self.fingerprint:
            _LOG.info("'%s' is of another source, configuration or data: starting from the first layer", self.work)
            return
        self.done = state.integer("done", 0, self._count)
        self.layers, self.kv_cache = dict(state.mapping("layers").content), dict(state.mapping("kv_cache").content)
        self.tensors = {name: state.mapping("tensors").text(name) for name in state.mapping("tensors")}
        self.size = state.integer("size")
        _LOG.info("'%s': %d of %d parts are finished, going on", self.work, self.done, self._count)

    def _note(self) -> None:
        names = ("fingerprint", "done", "layers", "kv_cache", "tensors", "size")
        write_json({name: getattr(self, name) for name in names}, self.work / STATE)
        for path in self.work.iterdir():
            if _HIDDEN.fullmatch(path.name) and path.name != self._hidden_file(self.done).name:
                path.unlink()

    def _hidden_file(self, number: int) -> Path:
        return self.work / f"hidden-{number:05}.safetensors"

    def _write(self, paths: Iterable[str]) -> None:
        """Write the tensors of these modules as the next file."""
        file = shard_name(self.done, self._count)
        tensors = self.parts.tensors(paths)
        with writing(self.work):
            self.work.mkdir(parents=True, exist_ok=True)  # not before: a run that fails early leaves nothing
        write_shard(tensors, self.work / file)
        self.tensors |= dict.fromkeys(tensors, file)
        self.size += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self.done += 1

    # ---- the steps
    def quantize(self) -> None:
        """Quantize and write what is not finished yet."""
        source, parts = self.source, self.source.architecture
        if self.done == self._count:
            return
        work = ModelWork(source.model, parts, self.settings)
        call("language", "before_layers", work)  # checks of names: nothing that needs numbers is on
        is_calibrated = self.batches is not None and self.done < self._count - 1  # the rest is written as it is
        streams = self._streams() if is_calibrated else None
        with track(self._count, "quantizing layers") as advance:
            for _ in range(self.done):
                advance()
            for index in range(self.done, parts.count):
                path = parts.layer(index)
                source.fill([path])
                self._quantize(work, streams, index)
                source.model.set_submodule(path, nn.Identity())
                release_memory()
                advance()
            if self.done == parts.count and self._has_head:
                self._head(work, streams)
                source.model.set_submodule(str(parts.head), nn.Identity())
                release_memory()
                advance()
            source.fill(source.outside())
            self._write(self._owners(source.outside()))
            self._note()
            advance()

    def _streams(self) -> Streams:
        """The hidden states before the first layer that is not finished."""
        source, parts = self.source, self.source.architecture
        assert self.batches is not None
        outside = source.outside()
        source.fill([*outside, parts.layer(0)])
        streams = start_streams(source.model, parts, self.batches, has_exact=follows_float(self.settings))
        norms = {parts.norm}
        source.release(path for path in outside if path not in norms)
        for index in range(min(self.done, parts.count)):
            streams.calls[index].clear()
            source.model.set_submodule(parts.layer(index), nn.Identity())
        if self.done:
            with self._trusting_work():
                self._read_hidden(streams)
        release_memory()
        return streams

    def _read_hidden(self, streams: Streams) -> None:
        hidden = Checkpoint(self.work, self._hidden_file(self.done).name)
        for name, values in (("seen", streams.seen), ("exact", streams.exact)):
            for number, like in enumerate(values or ()):
                key = f"{name}.{number}"
                hidden.check(key, like.dtype, tuple(like.shape))
                assert values is not None
                values[number] = hidden.read([key])[key].to(like.device)

    def _quantize(self, work: ModelWork, streams: Streams | None, index: int) -> None:
        path = work.architecture.layer(index)
        calls = () if streams is None else streams.calls[index]
        layer = LayerWork(
            work.model, work.architecture, self.settings, path, work.model.get_submodule(path), calls, streams
        )
        quantize_layer(layer)
        self._record()
        self._write(self._owners([path]))
        if streams is not None:
            streams.advance(calls, layer.layer, layer.exact_layer)
            streams.calls[index].clear()
            states = {f"seen.{number}": hidden for number, hidden in enumerate(streams.seen)}
            states |= {f"exact.{number}": hidden for number, hidden in enumerate(streams.exact or ())}
            write_shard(states, self._hidden_file(self.done))
        self._note()

    def _head(self, work: ModelWork, streams: Streams | None) -> None:
        source, parts = self.source, self.source.architecture
        assert parts.head is not None
        source.fill([path for path in (parts.norm, parts.head) if path is not None])
        quantize_layer(head_work(work, streams))
        self._record()
        self._write([parts.head, *([parts.norm] if parts.norm is not None else [])])
        self._note()

    def _owners(self, tops: Iterable[str]) -> list[str]:
        """The paths of modules with tensors under these ones that are in no file yet."""
        prefixes = tuple(tops)
        written = set(self.tensors)
        owners = [p for p in self.parts.owners() if any(p == top or p.startswith(f"{top}.") for top in prefixes)]
        return [path for path in owners if not any(name.rpartition(".")[0] == path for name in written)]

    def _record(self) -> None:
        """Note the types of the layers that are in memory now."""
        types = self.parts.file_types(self.settings)
        self.layers |= {name: layer_record(layer) for name, layer in types.layers.items()}
        self.kv_cache |= {
            name: {"is_post_rope": cache.is_post_rope, "types": layer_record(cache.as_layer())}
            for name, cache in types.kv_cache.items()
        }

    def finish(self) -> None:
        """Write what describes the files, and move everything into the output."""
        layers = {name: read_layer_record(Fields(record, STATE)) for name, record in sorted(self.layers.items())}
        cached = {}
        for name, record in sorted(self.kv_cache.items()):
            fields = Fields(record, STATE)
            spec = read_layer_record(fields.mapping("types")).output
            assert spec is not None
            cached[name] = KvTypes(spec, fields.boolean("is_post_rope"))
        has_branches = any(name.endswith(BRANCHES) for name in self.tensors)
        types = FileTypes(self.layout, layers, cached, self.settings.config, has_branches)
        excluded = [name for name in self.linears if name not in layers]
        files = describe(
            self.source.model, types, excluded, is_tied=self.source.architecture.is_tied and not self._has_head
        )
        files[CONFIG]["dtype"] = str(self.source.dtype).removeprefix("torch.")
        index = {"metadata": {"total_size": self.size}, "weight_map": self.tensors}
        described = {INDEX: index, **files}
        for name, content in described.items():
            write_json(content, self.work / name)
        companions = companions_of(self.source.checkpoint.folder)
        for name, raw in companions.items():
            write_bytes(raw, self.work / name)
        shards = set(self.tensors.values())
        with writing(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
        last = (INDEX, CONFIG)
        moved = [name for name in shards if (self.work / name).exists()]  # others were moved before the run was killed
        with self._trusting_work():
            for name in sorted(shards):
                Checkpoint(self.work if name in moved else self.output, name)  # checks everything but the numbers
        with writing(self.output):
            (self.output / CONFIG).unlink(missing_ok=True)  # while a model is being replaced, the folder is not a model
        for name in (*sorted({*moved, *companions, *described} - {*last}), *last):
            move(self.work / name, self.output / name)
        remove_stale(self.output, {INDEX, *shards})
        with writing(self.work):
            shutil.rmtree(self.work)


def _fingerprint(run: _Run) -> str:
    """A hash of everything that the bytes of the output depend on. Files count by size and time."""
    source = run.source.checkpoint
    files = sorted({entry.file for entry in source.entries.values()})
    stats = [(file.name, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    data = hashlib.sha256()
    for batch in run.batches or ():
        for name, value in sorted(batch.items()):
            content = (
                value.cpu().contiguous().numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
            )
            data.update(f"{name} {getattr(value, 'shape', '')}".encode() + content)
    config = read_bytes(source.folder / CONFIG, f"'{source.folder / CONFIG}'", RECORD.bytes, ModelError)
    described = {
        "version": _VERSION,
        "versions": [quark.__version__, torch.__version__],
        "layout": repr(run.layout),
        "device": run.source.device.type,
        "config": hashlib.sha256(config).hexdigest(),
        "settings": dict(run.settings.config),
        "files": stats,
        "data": None if run.batches is None else data.hexdigest(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
