"""Hand documents with hostile values in them to everything that reads JSON or YAML; stop at the first surprise.

    python fuzz_documents.py [--count N] [--seconds S] [--seed N] [--door NAME] [--save DIR] [--keep-going]

A document is valid but for one to three places, where some value is replaced by one that should never be there: null, a
huge number, 10,000 brackets, half of a surrogate pair, an alias of itself. Every outcome has to be a result or a
QuarkError, or a mistake in the command line for `--set`, within a few seconds and a bound on memory. Each case is made
from the seed and its number alone; `--first CASE` begins with it, and `--save` keeps the document of a surprise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import click
import onnx
from onnx_models import conv_bn_relu
from packed_models import marked_model

from quark.account import FileFacts
from quark.card import CARD_KEY
from quark.cli.options import Calibration, parse_changes
from quark.cli.report_command import making_of
from quark.errors import QuarkError
from quark.features.mixed_precision.plan import Figure, LayerPrecision, Metric, MixedPlan
from quark.features.mixed_precision.score_file import read_scores
from quark.features.mixed_precision.subgraphs import read_subgraphs
from quark.files.foreign import read_json, read_text
from quark.inspect.diagnose.files import CONFIG_KEY, find_skipped, read_side
from quark.onnx import QConfig, quantize
from quark.onnx.calibrate import read_ranges
from quark.onnx.calibrate.range_files import read_range_file
from quark.onnx.data.images import find_preprocessing
from quark.onnx.load import load
from quark.onnx.pack import pack_model, unpack_model
from quark.onnx.pack.editing import KEY as PACKED_KEY
from quark.onnx.quantization.config.config import QuantizationConfig, get_default_config
from quark.onnx.quantization.config.files import changed, load_config
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.making import read_card
from quark.onnx.quantization.reproduction import find_data, settings_from
from quark.onnx.quantization.targets import Target as SearchTarget
from quark.plan import QuantizationPlan
from quark.search.candidates import ladder_for
from quark.search.journal import Journal
from quark.search.trial import Measurement, Trial

MOST_MEMORY_BYTES = 3 << 30  # beyond what the process has when it begins
MOST_SECONDS = 20  # for one case, on a loaded machine
RANGES_KEY = "0" * 64

# As JSON writes them, and YAML too.
HOSTILE = (
    *("null", "true", "false", "-1", "0", "1", "3", "0.5", "-0.0", "1e400", "-1e400", "NaN", "Infinity", "1e-320"),
    *("9007199254740993", "9223372036854775808", "1" + "0" * 200, "1" * 5000, "0." + "1" * 5000, "[]", "{}", "[[]]"),
    *('""', '"x"', '"../../victim"', '"/dev/zero"', '"\\u0000"', '"\\ud800"', '"2020-01-01"', '"nan"', '"1"', '"."'),
    *('["x"]', '[1, "a"]', '{"a": 1}', '{"name": {}}', "[null, null]", '[["x"], 1]', '{"": null}', "[0, 0, 0]"),
    *('"QuantType.QInt8"', '"QuantType.Nothing"', '"CalibrationMethod.MinMax"', "[1e400]", "[[[[1]]]]", "[-1, 1e300]"),
    *('"' + "x" * 1_000_000 + '"', "[" * 10_000 + "]" * 10_000, '{"a":' * 10_000 + "1" + "}" * 10_000),
    "[" + ",".join(["0"] * 30_000) + "]",
)
# As only YAML has them. The alias bombs expand to 10^10 entries, by lists and by merged mappings.
BOMB = (
    "[&a [x,x,x,x,x,x,x,x,x,x],"
    + ",".join(f"&{b} [{','.join([f'*{a}'] * 10)}]" for a, b in zip("abcdefghi", "bcdefghij", strict=True))
    + "]"
)
MERGED = (
    "[&a {x: 1},"
    + ",".join(f"&{b} {{<<: [{','.join([f'*{a}'] * 10)}]}}" for a, b in zip("abcdefghi", "bcdefghij", strict=True))
    + "]"
)
HOSTILE_YAML = (
    *("2020-01-01", "2001-99-99", "2001-12-14t21:59:43.10-05:00", ".inf", ".nan", "0x_", "0x" + "f" * 5000, "0b_"),
    *(":".join(["59"] * 90), ":".join(["59"] * 90) + ".5", "!!python/object/apply:os.system [ls]", "!!binary aGk="),
    *("!!set {a, b}", "!!float ''", "!!int x", "&a [*a]", "*nothing", "&a {b: *a}", "!!timestamp x", "{[a]: 1}"),
    *("{? {a: b} : 1}", "~", "yes", "1_0", "017", BOMB, MERGED, "{<<: 1}", "{<<: [1]}", "'\\u2028'", "\t", "@", "%"),
)


@dataclass(frozen=True)
class Door:
    """`documents` are the names of what is changed for it; `share` is how often it is chosen, against the others."""

    name: str
    enter: Callable[[Path], object]
    documents: tuple[str, ...]
    suffix: str = ".json"
    share: float = 1.0


def make_documents(folder: Path) -> dict[str, Any]:
    """One valid document of every kind, as Python has it."""
    onnx.save(conv_bn_relu(), folder / "float.onnx")
    onnx.save(marked_model("mxint8", shapes=(((8, 64), 1), ((6, 40), 1))), folder / "blocks.onnx")
    pack_model(folder / "blocks.onnx", folder / "packed.onnx")
    settings = get_default_config("XINT8")
    settings.extra_options["UseRandomData"] = True
    model = quantize(folder / "float.onnx", config=settings)
    model.save(folder / "small.onnx")
    report = json.loads((folder / "small.json").read_text())
    layers = (LayerPrecision("a", "Conv", 0.5, 10, 20), LayerPrecision("b"))
    figures = (Figure(Metric.SQNR, 20.0, 10.0),)
    mixed = replace(MixedPlan(layers, "int16", "int8").with_lowered(["b"]), figures=figures, samples=3)
    candidate = CANDIDATES[0]
    measured = Measurement(100, 1.0, 2.0, "top1", 0.1, 0.5, is_packed=True, verdict="OK", latency_ratio=0.5)
    trial = Trial(candidate.name, candidate.preset, candidate.stage, (("A", 1),), measured, seconds=1.0, remarks=("r",))
    journal = Journal(folder / "search", BASIS)
    journal.trials_folder.mkdir(parents=True)
    journal.models_folder.mkdir()
    trial = replace(trial, basis=journal.basis_of(candidate), model=f"{candidate.name}.onnx")
    return {
        "fields": QuantizationConfig().to_dict(),
        "preset": {"preset": "A8W8_ADAROUND", "per_channel": True, "extra_options": EXTRA_OPTIONS},
        "mixed": get_default_config("S16S16_MIXED_S8S8").to_dict(),
        "blocks": get_default_config("MXINT8").to_dict(),
        "by tensors": BY_TENSORS,
        "card": report["card"],
        "report": report,
        "plan": report["plan"],
        "mixed plan": json.loads(mixed.to_json()),
        "scores": {"version": "1.0", "cache_key": "k", "results": [SCORE, {**SCORE, "name": "b", "enabled": False}]},
        "subgraphs": {"num_subgraphs": 1, "subgraphs": [{"name": "a", "start_nodes": [], "end_nodes": []}]},
        "trial": trial.to_dict(),
        "search": {"basis": dict(BASIS), "trials": [trial.to_dict()], "front": [], "notes": []},
        "record": json.loads(_metadata(onnx.load(folder / "packed.onnx"))[PACKED_KEY]),
        "ranges": {"key": RANGES_KEY, "ranges": {"x": [-1.0, 2.0, 5], "y": [0.0, 2.0, None]}},
        "ranges of tensors": {
            "quark_version": "1",
            "tensors_range": {"x": [-1.0, 2.0], "y": [[0.0], [2.0]]},
            "data_range": {"x": [-1, 1]},
        },
        "passes": PASSES,
        "preprocessing": {"mean": [1.0, 2.0, 3.0], "std": 2.0, "divisor": 255, "size": 8, "short_side": 9},
        "number": [99.99],
        "names": [["Conv", "Gemm"]],
        "mapping": [EXTRA_OPTIONS["TensorQuantOverrides"]],
        "pairs": [[[["first"], ["last"]], [0.5, 0.1]]],
    }


SCORE = {"name": "a", "candidate_nodes": ["a"], "score": 0.1, "all_config_scores": [0.1], "best_config_index": 0}
BASIS = {"model": "m", "versions": "{}"}
PASSES = {
    "preprocess_passes": {
        "onnx_convert_opset_version": {"target_opset_version": 21},
        "onnx_copy_bias_init": {"shared_bias_op_types": ["Conv"]},
        "onnx_fix_shapes": {"input_output_name_shapes": {"x": [1, 3, 8, 8]}},
        "onnx_cross_layer_equalization": {"cle_steps": 2, "cle_weight_threshold": 0.5, "nodes_to_exclude": []},
        "onnx_simplify": {"simplify": True},
    },
    "postprocess_passes": {
        "onnx_align_scale": {"align_scale": ["Concat"]},
        "onnx_remove_qdq_between_op_types": {"remove_qdq_between_op_types": [["Conv", "Relu"]]},
    },
    "preprocessed_model_path": "float.onnx",
}
CANDIDATES = ladder_for(SearchTarget.CPU, False, False, False)
EXTRA_OPTIONS = {
    "FastFinetune": {"NumIterations": 10, "LRAdjust": [0.5, 0.1], "TargetOpType": ["Conv"], "FixedSeed": 3},
    "TensorQuantOverrides": {"x": [{"quant_type": "QuantType.QInt8", "symmetric": True, "rmin": -1, "rmax": 2.5}]},
    "MixedPrecisionTensor": {"QuantType.QUInt8": ["y"]},
    "RemoveQDQBetweenOps": [["Conv", "Relu"]],
    "QDQOpTypePerChannelSupportToAxis": {"MatMul": {"axis": 1}},
    "MatMulNBitsParams": {"Bits": 4, "GroupSize": 32},
    "FixShapes": "x:[1,3,8,8]",
    "PercentileCandidates": [99.9, 99.99],
    "OpTypesToExclude": ["Softmax"],
    "CalibDataSize": 100,
    "CalibCacheDir": "cache",
    "CopySharedInit": [],
}
BY_TENSORS = {
    "global_config": {"activation": {"data_type": "Int8"}, "weight": {"data_type": "Int8", "symmetric": True}},
    "specific_layer_config": [[{"weight": {"data_type": "Int16"}}, ["conv", "head"]], [None, ["last"]]],
    "layer_type_config": [[{"activation": {"data_type": "UInt8", "scale_type": "ScaleType.Float32"}}, ["Gemm"]]],
    "exclude": ["a", [["first"], ["last"]]],
    "algo_config": [
        {"name": "cle", "cle_steps": 2},
        {"name": "adaround", "num_iterations": 10, "lr_adjust": [0.5, 0.1]},
        {"name": "auto_mixprecision", "target_layer_config": {"weight": {"data_type": "Int8"}}, "metric_threshold": 1},
    ],
    "use_external_data_format": False,
    "extra_options": {"Percentile": 99.9},
}


def _metadata(model: onnx.ModelProto) -> dict[str, str]:
    return {prop.key: prop.value for prop in model.metadata_props}


def _with_metadata(path: Path, model: str, key: str) -> Path:
    """A model of the folder with the document as an entry of its metadata."""
    proto = onnx.load(path.with_name(model))
    values = {**_metadata(proto), key: path.read_text(encoding="utf-8", errors="replace")}
    del proto.metadata_props[:]
    for name, value in values.items():
        proto.metadata_props.add(key=name, value=value)
    target = path.with_name("with_metadata.onnx")
    onnx.save(proto, target)
    return target


def _config(path: Path) -> None:
    config = load_config(path)
    settings_of(config)
    (QConfig.load if isinstance(config, QConfig) else QuantizationConfig.load)(path)


def _set(path: Path) -> None:
    """The one value of the document as that of some key."""
    text = path.read_text(encoding="utf-8")
    keys = [
        "Percentile",
        "TensorQuantOverrides",
        "nodes_to_exclude",
        "MXAttributes.scale_rule",
        "FastFinetune.LRAdjust",
    ]
    keys += ["per_channel", "calibrate_method", "extra_options", "CalibDataSize", "FixShapes", "subgraphs_to_exclude"]
    context = click.Context(click.Command("quantize"))
    number = len(text) % len(keys)
    with contextlib.suppress(click.BadParameter):  # the usual error of a command line
        (change,) = parse_changes(context, click.Option(["--set"]), (f"{keys[number]}={text[1:-1]}",))
        settings_of(changed(get_default_config("A8W8"), [change]))


def _card(path: Path) -> None:
    card = read_card(path)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(QuarkError))
        find_data(card, None)
    settings_from(card.card)


def _trial(path: Path) -> None:
    journal = Journal(path.parent / "search", BASIS)
    candidate = CANDIDATES[0]
    shutil.copy(path, journal.trials_folder / f"{candidate.name}.json")
    (journal.models_folder / f"{candidate.name}.onnx").write_bytes(b"")
    trial = journal.finished(candidate)
    if trial is not None:
        journal.drop_beaten([trial, replace(trial, name="other")])
        assert (path.parent / "victim.onnx").exists()


def _search(path: Path) -> None:
    journal = Journal(path.parent / "search", BASIS)
    shutil.copy(path, journal.folder / "search.json")
    with contextlib.closing(journal):
        journal.open()


def _ranges(path: Path) -> None:
    shutil.copy(path, path.with_name(f"ranges-{RANGES_KEY[:32]}.json"))
    read_ranges(path.parent, RANGES_KEY, ["x", "y"])


def _passes(path: Path) -> None:
    settings_of(QuantizationConfig(extra_options={"ShapeShifterYaml": path}))


def _report(path: Path) -> None:
    model = path.with_name("small.onnx")
    shutil.copy(path, model.with_suffix(".json"))
    side = read_side(model)
    find_skipped(side)
    making_of(model, FileFacts(model.name, side.facts.bytes, side.facts.sha256), model, Calibration())


def _config_inside(path: Path) -> None:
    target = _with_metadata(path, "small.onnx", CONFIG_KEY)
    _ = read_side(target).config
    making_of(target, FileFacts(target.name, 1, "a" * 64), target, Calibration())


def _plan(path: Path) -> None:
    plan = QuantizationPlan.from_json(read_text(path, "plan"))
    plan.to_json()


def _mixed_plan(path: Path) -> None:
    MixedPlan.from_dict(read_json(path, "plan"), "plan").to_json()


def _subgraphs(path: Path) -> None:
    read_subgraphs(path, load(conv_bn_relu()).model)


def _unpack(path: Path) -> None:
    unpack_model(_with_metadata(path, "packed.onnx", PACKED_KEY), path.with_name("unpacked.onnx"))


CONFIGS = ("fields", "preset", "mixed", "blocks", "by tensors")
DOORS = [
    Door("config json", _config, CONFIGS, share=4),
    Door("config yaml", _config, CONFIGS, ".yaml", share=3),
    Door("set", _set, ("number", "names", "mapping", "pairs"), ".yaml", share=2),
    Door("card", _card, ("card", "report"), share=3),
    Door("card inside", lambda path: _card(_with_metadata(path, "small.onnx", CARD_KEY)), ("card",), share=2),
    Door("config inside", _config_inside, CONFIGS),
    Door("report", _report, ("report",)),
    Door("trial", _trial, ("trial",), share=2),
    Door("search", _search, ("search",)),
    Door("record", _unpack, ("record",), share=2),
    Door("ranges", _ranges, ("ranges",)),
    Door("ranges of tensors", read_range_file, ("ranges of tensors",)),
    Door("passes", _passes, ("passes",), ".yaml", share=2),
    Door("plan", _plan, ("plan", "report"), share=2),
    Door("mixed plan", _mixed_plan, ("mixed plan",)),
    Door("scores", read_scores, ("scores",)),
    Door("subgraphs", _subgraphs, ("subgraphs",)),
    Door("preprocessing", find_preprocessing, ("preprocessing",), ".yaml"),
]


def torch_door(folder: Path, documents: dict[str, Any]) -> Door:
    """What `load_safetensors` reads. Not among the others, since torch takes seconds to import."""
    from frozen_networks import Style, frozen_network

    from quark.torch.export import export_safetensors, load_safetensors
    from quark.torch.quantization.pipeline import read_plan

    network = frozen_network("plain", Style("int8", "int8"))
    export_safetensors(network, folder / "exported")
    documents["exported"] = json.loads((folder / "exported" / "config.json").read_text())

    def enter(path: Path) -> None:
        shutil.copy(path, folder / "exported" / "config.json")
        with contextlib.suppress(QuarkError):
            read_plan(path)
        load_safetensors(network, folder / "exported")

    return Door("torch export", enter, ("exported",), share=2)


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values in a document."""
    if isinstance(content, (dict, list)):
        for key in content if isinstance(content, dict) else range(len(content)):
            yield (*path, key)
            yield from places(content[key], (*path, key))


def broken(rng: random.Random, document: Any, is_yaml: bool) -> str:
    """The text of the document with one to three values replaced, left out, or under another name."""
    content = json.loads(json.dumps(document))
    inserted: dict[str, str] = {}
    if rng.random() < 0.02:
        return rng.choice(HOSTILE)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        known = list(places(content))
        if not known:
            break
        # those near the root are few, and decide most
        *way, last = (
            rng.choice([each for each in known if len(each) <= 2] or known) if rng.random() < 0.4 else rng.choice(known)
        )
        place = content
        for key in way:
            place = place[key]
        kind = rng.random()
        if kind < 0.06:
            del place[last]
        elif kind < 0.12 and isinstance(place, dict):
            place[rng.choice(("", "x", "../x", "name", "\0", "é", "extra_options"))] = place.pop(last)
        else:
            mark = f"<{len(inserted)}-{rng.random()}>"
            inserted[json.dumps(mark)] = rng.choice(HOSTILE_YAML if is_yaml and rng.random() < 0.4 else HOSTILE)
            place[last] = mark
    text = json.dumps(content)
    for mark, value in inserted.items():
        text = text.replace(mark, value)
    return text


def run_case(door: Door, text: str, folder: Path) -> str:
    """What is surprising about the outcome; "fine" or "refused" if nothing is."""
    path = folder / f"document{door.suffix}"
    path.write_text(text, encoding="utf-8", errors="replace")
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        door.enter(path)
    except QuarkError as error:
        is_fine = bool(str(error).strip()) and len(str(error)) < 5000
        return "refused" if is_fine else f"a message of {len(str(error))} characters: {str(error)[:200]}"
    except (Exception, RecursionError):
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "fine"


def on_alarm(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"longer than {MOST_SECONDS} s")


def fuzz(arguments: argparse.Namespace, folder: Path) -> tuple[Counter[str], Counter[str]]:
    documents = make_documents(folder)
    (folder.parent / "victim.onnx").write_bytes(b"")
    (folder / "victim.onnx").write_bytes(b"")
    doors = list(DOORS)
    if arguments.torch or arguments.door == "torch export":
        doors.append(torch_door(folder, documents))
    doors = [door for door in doors if arguments.door in (None, door.name)]
    usage = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (usage + MOST_MEMORY_BYTES, resource.RLIM_INFINITY))
    signal.signal(signal.SIGALRM, on_alarm)
    logging.getLogger("quark").setLevel(logging.CRITICAL)  # a cache that is ignored is a warning
    counts: Counter[str] = Counter()
    by_door: Counter[str] = Counter()
    end = time.monotonic() + arguments.seconds
    for number in range(arguments.first, arguments.first + arguments.count):
        if time.monotonic() > end:
            break
        rng = random.Random(f"{arguments.seed}-{number}")
        (door,) = rng.choices(doors, [door.share for door in doors])
        name = rng.choice(door.documents)
        text = broken(rng, documents[name], door.suffix == ".yaml")
        outcome = run_case(door, text, folder)
        counts[outcome if outcome in ("fine", "refused") else "surprises"] += 1
        by_door[door.name] += 1
        if outcome in ("fine", "refused"):
            continue
        saved = Path(arguments.save) / f"document-{arguments.seed}-{number}{door.suffix}"
        saved.write_text(text, encoding="utf-8", errors="replace")
        print(f"SURPRISE: seed {arguments.seed}, case {number}, door {door.name}, made of {name}: {saved}")
        print(outcome[-3000:], flush=True)
        if not arguments.keep_going:
            break
    return counts, by_door


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1_000_000_000)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--door", help="only this one")
    parser.add_argument("--torch", action="store_true", help="also what quark.torch reads")
    parser.add_argument("--save", default=".", help="where the document of a surprise goes")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first surprise")
    arguments = parser.parse_args()
    arguments.save = os.path.abspath(arguments.save)
    work = Path(tempfile.mkdtemp(prefix="fuzz-"))
    (work / "inside").mkdir()
    os.chdir(work / "inside")  # what a document names lies elsewhere
    try:
        counts, by_door = fuzz(arguments, work / "inside")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"{sum(counts.values())} cases of seed {arguments.seed}: {json.dumps(counts)}; {json.dumps(by_door)}")
    if counts["surprises"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
