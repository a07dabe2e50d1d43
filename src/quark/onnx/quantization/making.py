"""The card of a run: what `quark.card.Card` says, gathered from the settings, the data and the plan."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import onnx

from quark.account import FileFacts
from quark.card import CARD_KEY, Card, DataFacts, DataKind, platform_facts, relative_path, samples_digest
from quark.files.foreign import REPORT, parse_json
from quark.measures import FunctionMeasure
from quark.onnx.data import Samples, find_preprocessing
from quark.onnx.load import LoadedModel
from quark.onnx.quantization.data import Data
from quark.onnx.quantization.presets import PRESETS
from quark.onnx.quantization.settings import Settings
from quark.onnx.quantization.versions import versions
from quark.text import shell_command

CONFIG_FILE = "config.yaml"  # in commands, for what is no preset with changes
USUAL_PREPROCESSING = "imagenet"
_MOST_CHANGES = 12  # beyond them a file says it better

Change = tuple[str, Any]


def data_facts(data: Data, samples: Samples, settings: Settings) -> DataFacts:
    """What the samples are. To be asked before any is dropped: the hash is about all that were read."""
    if not samples.count:
        return DataFacts(DataKind.UNUSED, seed=settings.calibrate.seed)
    source = None if settings.calibrate.has_random_data else data.source
    path = source_path(source)
    fields = asdict(find_preprocessing(data.preprocessing))
    preprocessing = {name: list(each) if isinstance(each, tuple) else each for name, each in fields.items()}
    return DataFacts(
        kind=_kind(source, path),
        name=path.resolve().name if path is not None else "" if source is None else type(source).__name__,
        count=data.count,
        batch_size=data.batch_size,
        preprocessing=preprocessing if path is not None and path.is_dir() else {},
        samples=samples.count,
        held_out=len(samples.held_out),
        sha256=samples_digest(samples, samples.held_out),
        seed=settings.calibrate.seed,
    )


def source_path(source: Any) -> Path | None:
    """Where data or a model lies, if it lies on the disk."""
    return Path(source) if isinstance(source, (str, os.PathLike)) else None


def _kind(source: Any, path: Path | None) -> DataKind:
    if source is None:
        return DataKind.RANDOM
    if path is None:
        return DataKind.OBJECT
    return DataKind.FOLDER if path.is_dir() else DataKind.FILE


def card_of(settings: Settings, loaded: LoadedModel, data: DataFacts, plan_sha256: str) -> Card:
    """The card but for the file that is still to be written. The hash of a large source is waited for."""
    finetune = settings.refine.finetune
    seeds = {"data": settings.calibrate.seed} if data.kind is DataKind.RANDOM else {}
    used = versions()
    if finetune is not None:
        seeds["finetuning"] = finetune.fit.seed
        used["torch"] = importlib.metadata.version("torch")
    functions = []
    if settings.mix is not None and settings.mix.evaluate is not None:
        functions.append("EvaluateFunction")
    if settings.mix is not None and isinstance(settings.mix.measure, FunctionMeasure):
        functions.append("Metric")
    return Card(
        source=FileFacts(loaded.name, loaded.bytes, loaded.sha256),
        config_name=settings.name,
        config=settings.config,
        data=data,
        versions=used,
        plan_sha256=plan_sha256,
        seeds=seeds,
        functions=tuple(functions),
    )


def put_card(proto: onnx.ModelProto, card: Card) -> None:
    """Let the model say what the card says of it, in the place of what it said before."""
    text = card.inside().to_json()
    for each in proto.metadata_props:
        if each.key == CARD_KEY:
            each.value = text
            return
    proto.metadata_props.add(key=CARD_KEY, value=text)


def placed(card: Card, target: Path, source: Any, data: Any, result: FileFacts | None) -> Card:
    """The card as it lies beside the model: with what belongs to this run. `source` and `data` as the user gave them;
    names and relative paths are kept of those that are files or folders."""
    folder = target.parent
    given = {"source": source_path(source), "data": source_path(data)}
    ways = {name: relative_path(path, folder) for name, path in given.items() if path is not None}
    paths = {name: way for name, way in ways.items() if way is not None}
    return replace(card, platform=platform_facts(), command=command_of(card), paths=paths, result=result)


def command_of(card: Card, target: str = "OUT.onnx") -> str:
    """Return the command that makes the file, with names instead of paths. A config that cannot be written as a preset
    with a few changes appears as a file name; `quark reproduce` does not need that file."""
    parts: list[str | Path] = ["quark", "quantize", Path(card.source.name or "MODEL.onnx"), target]
    known = preset_and_changes(card.config)
    if known is None:
        parts += ["--config", CONFIG_FILE]
    else:
        parts += ["--config", known[0], *set_arguments(known[1])]
    options = card.config.get("extra_options")
    is_asked_for = isinstance(options, Mapping) and bool(options.get("UseRandomData"))
    parts += ["--random"] if card.data.kind is DataKind.RANDOM and not is_asked_for else _data_arguments(card.data)
    return shell_command([*parts, *(["--pack", card.packing] if card.packing else [])])


def packed_report(text: str, profile: str, result: FileFacts) -> str:
    """The report on a file, MODEL.json, when that was packed afterwards: its own hash, and how it is packed."""
    content = parse_json(text, "report", REPORT)
    content["result"] = asdict(result)
    if content.get("card"):
        card = replace(Card.from_dict(content["card"]), packing=profile, result=result)
        content["card"] = replace(card, command=command_of(card)).to_dict()
    return json.dumps(content, indent=1, allow_nan=False)


def set_arguments(changes: tuple[Change, ...]) -> list[str]:
    """Changes as --set has them: values in YAML, on one line."""
    return [part for key, value in changes for part in ("--set", f"{key}={_yaml(value)}")]


def _yaml(value: Any) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20).strip()
    return text.removesuffix("...").strip()


def _data_arguments(data: DataFacts) -> list[str]:
    if data.kind not in (DataKind.FOLDER, DataKind.FILE, DataKind.OBJECT):
        return []
    parts = ["--calib", data.name if data.name and data.kind is not DataKind.OBJECT else "CALIB"]
    parts += [] if data.count is None else ["--num-calib", str(data.count)]
    parts += [] if data.batch_size == 1 else ["--batch-size", str(data.batch_size)]
    name = _preprocessing_name(data.preprocessing)
    return parts if name == USUAL_PREPROCESSING else [*parts, "--preprocess", name]


def _preprocessing_name(fields: Mapping[str, Any]) -> str:
    from quark.onnx.data.images import PRESETS as KNOWN
    from quark.onnx.data.images import Preprocessing

    wanted = Preprocessing(**fields) if fields else KNOWN[USUAL_PREPROCESSING]
    return next((name for name, each in KNOWN.items() if each == wanted), "preprocessing.yaml")


def preset_and_changes(config: Mapping[str, Any]) -> tuple[str, tuple[Change, ...]] | None:
    """The preset that a config is nearest to, and the changes that make it that config, as --set takes them. None for
    a config by tensors, one that leaves out what every near preset has, or one with many changes."""
    options = config.get("extra_options")
    if not isinstance(options, Mapping):
        return None
    # Few presets have to be built. One with an option that the config lacks is out, since --set takes nothing away; and
    # from any other there are at least as many changes as options it lacks, so the closest come first.
    candidates = sorted(
        (len(options) - len(preset.options), number, preset)
        for number, preset in enumerate(PRESETS.values())
        if preset.options.keys() <= options.keys()
    )
    best: tuple[int, int, str, tuple[Change, ...]] | None = None
    for least, number, preset in candidates:
        if least > _MOST_CHANGES or (best is not None and (least, number) > best[:2]):
            break
        changes = _changes(preset.config().to_dict(), config)
        if changes is not None and len(changes) <= _MOST_CHANGES:
            candidate = (len(changes), number, preset.name, changes)
            best = candidate if best is None or candidate[:2] < best[:2] else best
    return None if best is None else best[2:]


def _changes(base: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[Change, ...] | None:
    """None where something of the base is not there: --set adds and replaces, and takes nothing away."""
    if set(base) != set(wanted):
        return None
    found: list[Change] = [(key, wanted[key]) for key in wanted if key != "extra_options" and wanted[key] != base[key]]
    return _parts(found, base.get("extra_options"), wanted.get("extra_options"), "")


def _parts(found: list[Change], base: Any, wanted: Any, prefix: str) -> tuple[Change, ...] | None:
    if not isinstance(base, Mapping) or not isinstance(wanted, Mapping) or set(base) - set(wanted):
        return None
    for key, value in wanted.items():
        if key in base and isinstance(base[key], Mapping) and isinstance(value, Mapping):
            if _parts(found, base[key], value, f"{prefix}{key}.") is None:
                return None
        elif key not in base or value != base[key]:
            found.append((f"{prefix}{key}", value))
    return tuple(found)
