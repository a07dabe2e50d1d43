"""JSON and YAML that somebody else wrote: bounded, and every mistake is an error that names the document and the field.

bounds       size, depth, digits, entries, aliases; only regular files
fields       values of the wrong type, in every document that quark reads
paths        names in documents do not lead out of the folder, and folders are looked into with bounds
cards        a card draws no endless data, reads no endless file, and runs nobody's code
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run
from onnx_models import conv_bn_relu
from packed_models import marked_model

from quark.errors import InvalidValueError, ModelError, QuarkError, UnsupportedOptionError
from quark.features.finetuning.checkpoint import Checkpoint
from quark.features.finetuning.problem import Fitted
from quark.features.mixed_precision.plan import MixedPlan
from quark.files.foreign import (
    RECORD,
    SETTINGS,
    Fields,
    Limits,
    check_folder,
    parse_json,
    parse_yaml,
    read_bytes,
    read_json,
    read_yaml,
)
from quark.onnx import quantize
from quark.onnx.calibrate import read_ranges
from quark.onnx.data.images import find_preprocessing
from quark.onnx.pack import pack_model, unpack_model
from quark.onnx.pack.editing import KEY as PACKED_KEY
from quark.onnx.quantization.config.config import QConfig, QuantizationConfig, get_default_config
from quark.onnx.quantization.config.files import changed, load_config
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.making import read_card
from quark.onnx.quantization.reproduction import reproduce, settings_from
from quark.plan import QuantizationPlan
from quark.search.candidates import Candidate
from quark.search.journal import Journal
from quark.search.trial import Measurement, Stage, Trial

LETTERS = "abcdefghij"


def _bomb(body: str) -> str:
    """Each line repeats the one before it ten times: 10^10 entries, if they were expanded."""
    lines = [f"{b}: &{b} {body.format(','.join([f'*{a}'] * 10))}" for a, b in pairwise(LETTERS)]
    return "\n".join(["a: &a {x: 1}", *lines])


@pytest.fixture(autouse=True)
def _seconds() -> Iterator[None]:
    """Whatever hangs is ended."""

    def stop(*_: object) -> None:
        raise TimeoutError("longer than 20 s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------- bounds
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config is not valid JSON"),
        ('{"a": {"b": [1, 1e400]}}', r"field 'a\.b\[1\]' is inf: expected a finite number"),
        ('{"a": NaN}', "field 'a' is nan"),
        ('{"a": ' + "1" * 5000 + "}", "field 'a' is a number of 5,000 digits: expected at most 300"),
        ('{"a": 0.' + "1" * 5000 + "}", "field 'a' is a number of 5,002 digits"),
        ("[" * 100_000, "nested more than 40 levels"),
        ("[" * 41 + "]" * 41, "nested more than 40 levels"),
        ('{"a": "\\ud800"}', "field 'a' holds half of a surrogate pair"),
        ('{"\\ud800": 1}', "has a name that holds half of a surrogate pair"),
        ('{"a": "' + "x" * (2 << 20) + '"}', "field 'a' has 2,097,152 characters"),
        ("[" + "[]," * (1 << 21) + "[]]", "more than 2,097,152 entries"),
        ('{"a": {"b": 1, "c": 2, "b": 3}}', r"field 'a\.b' is there twice"),
    ],
    ids=lambda value: value[:30],
)
def test_json_is_bounded(text: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message) as caught:
        parse_json(text, "config", RECORD)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "config is not valid YAML"),
        (_bomb("[{}]"), "line 6: it has more than 200,000 entries, aliases expanded"),
        (_bomb("{{<<: [{}]}}"), "more than 200,000 entries, aliases expanded"),
        ("a: &a [*a]", "line 1: no anchor 'a' ends before this alias"),
        ("a: {b: *c}", "no anchor 'c'"),
        ("- " * 5000, "nested more than 40 levels"),
        ("[" * 5000, "nested more than 40 levels"),
        ("? " * 5000, "nested more than 40 levels"),
        ("a: {b: 2020-01-01}", r"field 'a\.b' is a date: write it in quotes"),
        ("a: 2001-99-99", "field 'a' is a date"),
        ("a: 0x" + "f" * 5000, "field 'a' is a number of 5,002 digits"),
        ("a: 0x" + "f" * 290, "field 'a' is a number too large"),
        ("a: 0x_", "field 'a' is '0x_': expected a value of type int"),
        ("a: !!float ''", "expected a value of type float"),
        ("a: !!binary aGk=", "field 'a' has the tag"),
        ("a: !!python/object/apply:os.getcwd []", "python/object/apply:os.getcwd' is not read"),
        ("!!set {a, b}", "is not read"),
        ("{[a]: 1}", "a key is a list or a mapping"),
        ("{<<: 1}", "'<<' takes a mapping"),
        ("a: 1\n---\nb: 2", "line 2: a second document begins"),
        ("a: " + "x" * 100_000, "field 'a' has 100,000 characters"),
        ("a: {b: 1, c: 2, b: 3}", "line 1: key 'b' is there twice"),
    ],
    ids=lambda value: value[:30],
)
def test_yaml_is_bounded(text: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message) as caught:
        parse_yaml(text, "config", SETTINGS)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "text",
    [
        *("", "a: 1", "{a: [1, -2.5, true, null, ~, yes, 0x1f, 017, 1_000, 1e5, 'x', \"\\u00e9\"]}"),
        *("a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}", "a: &x {b: 1}\nd: &y {b: 2, e: 3}\nf: {<<: [*x, *y], g: 4}"),
        *("- &a b\n- *a\n- {*a : 1}", "a: |\n  text\n  more\nb: >\n  folded", "[1:30, 1:30.5, -0.0, 1.5e+3]"),
    ],
)
def test_yaml_is_read_as_before(text: str) -> None:
    import yaml

    assert parse_yaml(text, "config") == yaml.safe_load(text)


def test_keys_of_yaml_are_text_as_it_is_written() -> None:
    content = parse_yaml("{1: a, yes: b, null: c, 2020-01-01: d}", "config")
    assert content == {"1": "a", "yes": "b", "null": "c", "2020-01-01": "d"}


def test_entries_of_yaml_are_counted() -> None:
    text = "\n".join(f"a{i}: 1" for i in range(600))
    with pytest.raises(InvalidValueError, match="config, line 500: it has more than 1,000 entries"):
        parse_yaml(text, "config", replace(SETTINGS, entries=1000))


def test_infinities_are_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"field '\[0\]' is inf"):
        parse_json("[Infinity]", "card", RECORD)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


ODD_FILES = [
    (_pipe, "it is a pipe; expected a regular file"),
    (_socket, "it is a socket"),
    (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
    (lambda path: path.symlink_to("/dev/tty"), "it is a device"),
    (lambda path: path.mkdir(), "it is a folder"),
    (lambda path: path.symlink_to(path.name), "symbolic links"),
    (lambda path: path.write_bytes(b"\xff\xfe{"), "not text in UTF-8"),
    (lambda path: path.write_bytes(b"x" * 2000), "2,000 bytes: expected at most 1,000"),
    (lambda path: None, "No such file"),
]
ODD_IDS = ["pipe", "socket", "zero", "tty", "folder", "loop", "binary", "large", "missing"]


@pytest.mark.parametrize(("make", "message"), ODD_FILES, ids=ODD_IDS)
@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_only_regular_files_of_a_reasonable_size_are_read(
    make: Callable[[Path], None], message: str, read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    path = Path("odd")
    make(path)
    with pytest.raises(InvalidValueError, match=f"config 'odd'.*{message}"):
        read(path, "config 'odd'", Limits(1000, 1000))


def test_a_file_that_grows_while_it_is_read_stays_within_the_bound() -> None:
    with pytest.raises(InvalidValueError, match="expected at most 10"):
        read_bytes("/proc/self/status", "config", 10)  # its size is said to be 0


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@pytest.mark.parametrize(("make", "message"), ODD_FILES[:3], ids=ODD_IDS[:3])
def test_every_reader_of_files_refuses_what_never_ends(
    make: Callable[[Path], None], message: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(f"odd{suffix}")
    make(path)
    doors: list[Callable[[], object]] = [lambda: load_config(path), lambda: settings_of(path)]
    if suffix == ".json":
        doors += [lambda: read_card(path), lambda: quantize(conv_bn_relu(), _samples(), _mixed_config(path))]
    else:
        doors += [lambda: find_preprocessing(path)]
    for door in doors:
        with pytest.raises(QuarkError, match=message):
            door()


def _samples() -> list[Any]:
    return [np.ones((2, 3, 8, 8), np.float32)] * 3


def _mixed_config(plan: Path) -> QuantizationConfig:
    config = get_default_config("S16S16_MIXED_S8S8")
    config.extra_options["AutoMixprecision"].update(PlanFile=str(plan), UsePlan=True)
    return config


# ---------------------------------------------------------------- fields
def test_fields_are_typed() -> None:
    content = {"text": "x", "count": 3, "number": 2, "far": "inf", "is": True, "list": ["a"], "inner": {"deep": -1}}
    fields = Fields(content, "trial 'a.json'")
    assert (fields.text("text"), fields.integer("count"), fields.number("number")) == ("x", 3, 2)
    assert (fields.number("far", is_finite=False), fields.boolean("is"), fields.texts("list")) == (
        float("inf"),
        True,
        ("a",),
    )
    for read, message in (
        (lambda: fields.text("count"), "trial 'a.json': field 'count' is 3: expected text"),
        (lambda: fields.text("text", ["y", "z"]), "field 'text' is 'x': expected one of y, z"),
        (lambda: fields.integer("is"), "field 'is' is True: expected an integer of at least 0"),
        (lambda: fields.integer("count", 0, 2), "expected an integer from 0 to 2"),
        (lambda: fields.number("far"), "field 'far' is 'inf': expected a number"),
        (lambda: fields.array("text"), "field 'text' is 'x': expected a list"),
        (lambda: fields.mapping("inner").integer("deep"), r"field 'inner\.deep' is -1"),
        (lambda: fields.mappings("list"), r"field 'list\[0\]' is 'a': expected a mapping"),
        (lambda: fields.value("none"), "field 'none' is missing"),
        (lambda: fields.refuse_others(["text"]), "field 'count' is not known: expected text"),
        (lambda: Fields([], "card", error=ModelError), r"card: it is \[\]: expected a mapping"),
    ):
        with pytest.raises(QuarkError, match=message):
            read()


def _yaml_config(folder: Path, text: str) -> Any:
    path = folder / "config.yaml"
    path.write_text(text)
    return settings_of(path)


BY_TENSORS = "global_config: {activation: {data_type: Int8}, weight: {data_type: Int8}}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BY_TENSORS + "specific_layer_config: [[null]]", r"specific_layer_config\[0\] is \[None\]: expected .* pairs"),
        (BY_TENSORS + "specific_layer_config: 5", "specific_layer_config is 5"),
        (
            BY_TENSORS + "layer_type_config: [[{weight: {data_type: Int8}}, Gemm]]",
            r"layer_type_config\[0\]\[1\] is 'Gemm'",
        ),
        (BY_TENSORS + "layer_type_config: [[5, [Gemm]]]", r"layer_type_config\[0\]\[0\]: layer config"),
        (BY_TENSORS + "exclude: 5", "exclude is 5: expected a list of names"),
        (BY_TENSORS + "algo_config: 5", "algo_config is 5"),
        (BY_TENSORS + "algo_config: [5]", r"algo_config\[0\]: algorithm: expected a mapping"),
        (BY_TENSORS + "algo_config: [{name: [cle]}]", r"algo_config\[0\]: no algorithm \['cle'\]"),
        (BY_TENSORS + "extra_options: [a]", "extra_options: expected a mapping"),
        ("global_config: {weight: {data_type: [Int8]}}", r"global_config: no data type \['Int8'\]"),
        ("global_config: {weight: {data_type: Int8, symmetric: 3}}", "symmetric of a tensor config: 3"),
        ("global_config: {weight: {data_type: Int8, scale_type: {}}}", "no scale_type {}"),
        ("preset: [XINT8]", r"preset is \['XINT8'\]"),
        ("extra_options: {TensorQuantOverrides: {x: [{rmin: [1, 2], rmax: 3}]}}", "TensorQuantOverrides.x.rmin"),
        ("extra_options: {TensorQuantOverrides: {x: [{scale: [[1]], zero_point: 0}]}}", "TensorQuantOverrides.x.scale"),
        ("extra_options: {CalibDataSize: 1" + "0" * 200 + "}", "CalibDataSize"),
        ("extra_options: {CalibCacheDir: 2020-01-01}", "field 'extra_options.CalibCacheDir' is a date"),
        ('extra_options: {CalibCacheDir: "\\0"}', "'CalibCacheDir'.*expected a path"),
        ("per_channel: " + "[" * 5000, "nested more than 40 levels"),
        (_bomb("[{}]"), "aliases expanded"),
        ("extra_options: {CLEWeightThreshold: .inf}", "field 'extra_options.CLEWeightThreshold' is inf"),
        ("5", "expected a mapping of fields, got 5"),
    ],
    ids=lambda value: value.replace(BY_TENSORS, "")[:40],
)
def test_configs_of_the_wrong_types_name_the_field(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(QuarkError, match=message) as caught:
        _yaml_config(tmp_path, text)
    assert "should not happen" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Percentile=2020-01-01", "it is a date"),
        ("Percentile=" + "[" * 5000, "nested more than 40 levels"),
        ("Percentile=" + "9" * 5000, "5,000 digits"),
        ("Percentile=" + _bomb("[{}]"), "aliases expanded"),
        (".".join(["extra_options"] + ["a"] * 5000) + "=1", "a key of more than 40 parts"),
        ("TensorQuantOverrides={x: [1]}", "TensorQuantOverrides.x"),
        ("specific_layer_config=[[1]]", "specific_layer_config"),
    ],
    ids=lambda value: value[:30],
)
def test_values_of_set_are_bounded(text: str, message: str, tmp_path: Path) -> None:
    onnx.save(conv_bn_relu(), tmp_path / "float.onnx")
    result = run(
        "quantize", tmp_path / "float.onnx", tmp_path / "out.onnx", "--random", "--config", "A8W8", "--set", text
    )
    assert result.exit_code in (1, 2)
    output = " ".join(result.output.split())
    assert message in output
    assert "should not happen" not in output


def test_infinite_options_are_refused_before_the_work() -> None:
    config = get_default_config("S16S16_MIXED_S8S8")
    config.extra_options["AutoMixprecision"]["SQNRTarget"] = float("-inf")
    with pytest.raises(InvalidValueError, match=r"'extra_options\.AutoMixprecision\.SQNRTarget' is -inf"):
        settings_of(config)


def test_a_long_key_in_python_is_bounded() -> None:
    with pytest.raises(InvalidValueError, match="a key of more than 40 parts"):
        changed(get_default_config("A8W8"), [(".".join(["extra_options"] * 100_000), 1)])


def _packed(folder: Path, edit: Callable[[dict[str, Any]], None] | str) -> Path:
    onnx.save(marked_model("mxint8", shapes=(((8, 64), 1),)), folder / "blocks.onnx")
    pack_model(folder / "blocks.onnx", folder / "packed.onnx")
    proto = onnx.load(folder / "packed.onnx")
    (entry,) = [prop for prop in proto.metadata_props if prop.key == PACKED_KEY]
    content = json.loads(entry.value)
    if isinstance(edit, str):
        entry.value = edit
    else:
        edit(content)
        entry.value = json.dumps(content)
    onnx.save(proto, folder / "packed.onnx")
    return folder / "packed.onnx"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.update(ir_version=float("inf")), "field 'ir_version' is inf"),
        (lambda c: c["weights"][0].update(dtype=float("inf")), r"field 'weights\[0\]\.dtype' is inf"),
        (lambda c: c["weights"][0].update(dtype=99), r"field 'weights\[0\]\.dtype' is 99: expected one of 1, 10, 16"),
        (lambda c: c["weights"][0].update(shape=[1, -1]), r"field 'weights\[0\]\.shape'"),
        (lambda c: c["weights"][0].update(planes=[]), r"field 'weights\[0\]\.planes'"),
        (lambda c: c["weights"][0].pop("name"), r"field 'weights\[0\]\.name' is missing"),
        (lambda c: c.update(values="abc"), "field 'values' is 'abc': expected a list"),
        (lambda c: c.update(version=[]), r"packed by version \[\]"),
        ("[" * 5000, "nested more than 40 levels"),
        ("{", "not valid JSON"),
    ],
)
def test_records_of_packing_are_checked(edit: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"packed.onnx.*{message}"):
        unpack_model(_packed(tmp_path, edit), tmp_path / "out.onnx")


@pytest.mark.parametrize(
    "ranges",
    [5, {"x": [1]}, {"x": [1, 2, 3.5]}, {"x": ["a", 2, None]}, {"x": [2, 1, None]}, {"x": [0, 1, 10**15]}, {"x": {}}],
    ids=str,
)
def test_a_cache_of_the_wrong_types_is_ignored(ranges: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = "a" * 64
    (tmp_path / f"ranges-{key[:32]}.json").write_text(json.dumps({"key": key, "ranges": ranges}))
    assert read_ranges(tmp_path, key, ["x"]) is None
    assert "is ignored" in caplog.text


PLAN_TENSOR: dict[str, Any] = {
    "tensor": "x",
    "role": "activation",
    "choice": {"kind": "affine", "format": "int8", "scale": [0.5], "zero_point": [0], "axis": None, "group_size": None},
    "readers": [["conv", 0]],
    "reason": "",
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"readers": [["conv"]]}, r"field 'tensors\[0\]\.readers' is \[\['conv'\]\]: expected a list of pairs"),
        ({"readers": [["conv", "0"]]}, r"tensors\[0\]\.readers"),
        ({"tensor": 5}, r"field 'tensors\[0\]\.tensor' is 5"),
        (
            {"choice": {**PLAN_TENSOR["choice"], "scale": ["a"]}},
            r"choice\.scale' is \['a'\]: expected a list of numbers",
        ),
        ({"choice": {**PLAN_TENSOR["choice"], "zero_point": [1 << 60]}}, "integers from -128 to 127"),
        ({"choice": {**PLAN_TENSOR["choice"], "scale": {"type": "O", "base64": "AA=="}}}, r"choice\.scale\.type"),
        ({"choice": {**PLAN_TENSOR["choice"], "scale": {"type": "<f4", "base64": "AA="}}}, r"choice\.scale\.base64"),
        ({"choice": {**PLAN_TENSOR["choice"], "format": "int99"}}, "plan, tensor 'x': no format 'int99'"),
        ({"choice": {"kind": "block", "format": {}}}, r"choice\.format\.element"),
    ],
    ids=str,
)
def test_plans_of_the_wrong_types_name_the_field(changes: dict[str, Any], message: str) -> None:
    content = {"version": 1, "tensors": [{**PLAN_TENSOR, **changes}], "skipped": []}
    with pytest.raises(InvalidValueError, match=message):
        QuantizationPlan.from_json(json.dumps(content))


def test_a_mixed_plan_of_many_lines_is_read_in_time() -> None:
    layers = [{"layer": str(i), "choice": "low"} for i in range(20_000)]
    start = time.monotonic()
    assert len(MixedPlan.from_json(json.dumps({"layers": layers})).layers) == 20_000
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "arrays",
    [
        {"weight": np.zeros((2, 3), np.float32)},
        {"weight": np.full(12, np.nan, np.float32)},
        {"weight": np.zeros(12, np.int64)},
        {"bias": np.zeros(5, np.float32)},
        {"numbers": np.zeros(3)},
        {"remark": np.zeros(3)},
        {"remark": np.array([0x110000], np.uint32).view("U1")[0:1].reshape(())},  # no Unicode
    ],
    ids=lambda arrays: f"{next(iter(arrays))} {next(iter(arrays.values())).shape}",
)
def test_a_checkpoint_of_another_shape_is_ignored(
    arrays: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, sizes = Checkpoint(tmp_path, ["facts"]), {"weight": 12, "bias": 4}
    checkpoint.write(0, Fitted(np.ones((4, 3), np.float32), np.ones(4, np.float32), 1.0, 0.5, 10, 0.1, "x"))
    kept = checkpoint.read(0, sizes)
    assert kept is not None
    assert kept.remark == "x"
    with np.load(checkpoint.folder / "0000.npz") as content:
        np.savez(checkpoint.folder / "0000.npz", **{**dict(content), **arrays})
    assert checkpoint.read(0, sizes) is None
    assert "0000.npz is ignored" in caplog.text


# ---------------------------------------------------------------- paths
CANDIDATE = Candidate("XINT8", "XINT8", Stage.DIRECT)


def _journal(folder: Path, **changes: Any) -> Journal:
    """A folder of a search with one finished trial, of which its file says these other things."""
    journal = Journal(folder / "search", {"model": "m"})
    journal.trials_folder.mkdir(parents=True)
    journal.models_folder.mkdir()
    (journal.models_folder / "XINT8.onnx").write_bytes(b"")
    trial = Trial("XINT8", "XINT8", Stage.DIRECT, measured=Measurement(100, 1.0, 2.0), model="XINT8.onnx")
    content = replace(trial, basis=journal.basis_of(CANDIDATE)).to_dict() | changes
    (journal.trials_folder / "XINT8.json").write_text(json.dumps(content))
    return journal


@pytest.mark.parametrize("name", ["../../victim", "../victim", "a/b", "..", "a\\b", "x" * 300])
def test_a_trial_does_not_say_which_files_are_removed(name: str, tmp_path: Path) -> None:
    for place in (tmp_path / "victim.onnx", tmp_path / "search" / "victim.onnx"):
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(b"mine")
    journal = _journal(tmp_path, name=name, model=f"{name}.onnx")
    assert journal.finished(CANDIDATE) is None
    assert "'name'" in journal.notes[0]
    assert (tmp_path / "victim.onnx").read_bytes() == b"mine"


def test_a_trial_is_known_by_its_candidate(tmp_path: Path) -> None:
    journal = _journal(tmp_path, name="other", preset="-rf", changes=[["x", 1]], model="../x")
    (tmp_path / "search" / "models" / "other.onnx").write_bytes(b"mine")
    trial = journal.finished(CANDIDATE)
    assert trial is not None
    assert (trial.name, trial.preset, trial.changes, trial.model) == ("XINT8", "XINT8", (), "XINT8.onnx")
    better = replace(trial, name="better", measured=Measurement(10, 0.0, 1.0), model="better.onnx")
    journal.drop_beaten([trial, better])
    assert not (journal.models_folder / "XINT8.onnx").exists()
    assert (journal.models_folder / "other.onnx").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"changes": [["a"]]}, "'changes'"),
        ({"measured": {"size_bytes": "1"}}, "'measured.size_bytes'"),
        ({"seconds": float("inf")}, "'seconds'"),
        ({"stage": []}, "'stage'"),
        ({"remarks": "abc"}, "'remarks'"),
        ({"measured": None}, "'measured', or 'failure'"),
    ],
    ids=str,
)
def test_damaged_trials_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    journal = _journal(tmp_path, **changes)
    assert journal.finished(CANDIDATE) is None
    assert message in journal.notes[0]
    assert "XINT8.json is damaged" in journal.notes[0]


def test_a_folder_is_looked_into_with_a_bound(tmp_path: Path) -> None:
    for i in range(5):
        (tmp_path / "a" / str(i)).mkdir(parents=True)
    (tmp_path / "a" / "0" / "up").symlink_to(tmp_path)
    check_folder(tmp_path, "data", 7)
    with pytest.raises(InvalidValueError, match="data holds more than 6 files and folders"):
        check_folder(tmp_path, "data", 6)


# ---------------------------------------------------------------- cards
@pytest.fixture
def card(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A file that was quantized on arrays, and the content of its card."""
    place = tmp_path / "out"
    place.mkdir()
    onnx.save(conv_bn_relu(), place / "float.onnx")
    np.savez(place / "calib.npz", x=np.random.default_rng(0).standard_normal((8, 3, 8, 8)).astype(np.float32))
    quantize(place / "float.onnx", place / "calib.npz", "A8W8").save(place / "small.onnx")
    path = place / "small.json"
    return path, json.loads(path.read_text())


def _changed_card(card: tuple[Path, dict[str, Any]], **changes: Any) -> Path:
    path, content = card
    for name, value in changes.items():
        *outer, last = name.split("__")
        place = content["card"]
        for part in outer:
            place = place[part]
        place[last] = value
    path.write_text(json.dumps(content))
    return path


def test_a_card_of_ours_still_works(card: tuple[Path, dict[str, Any]]) -> None:
    assert reproduce(card[0]).is_same


def test_a_card_finds_its_data_in_a_folder_beside_its_own(card: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "out" / "calib.npz").rename(tmp_path / "data" / "calib.npz")
    assert reproduce(_changed_card(card, paths__data="../data/calib.npz")).is_same


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__count": 10**15}, "'data.count'.*expected an integer from 1 to 100000000"),
        ({"data__batch_size": 10**15}, "'data.batch_size'"),
        ({"data__samples": 10**15}, "'data.samples'"),
        ({"data__kind": "random", "data__count": 10**8}, "random samples"),
        (
            {"data__kind": "random", "config__extra_options": {"CalibDataSize": 10**15}, "data__count": None},
            "random samples",
        ),
        ({"paths__data": "../../..", "data__name": "x"}, "was not found; give --calib"),
        ({"paths__data": "..", "data__name": "out"}, "was not found; give --calib"),
        ({"paths__data": "/dev/zero"}, "'paths.data'.*relative path"),
        ({"data__preprocessing": {"size": 10**9}}, "data.preprocessing.*size"),
        ({"data__preprocessing": {"nothing": 1}}, "data.preprocessing"),
        ({"data__preprocessing": {"mean": [1] * 9}}, "data.preprocessing.*mean"),
        ({"config__extra_options": 5}, "extra_options"),
        ({"config__nodes_to_exclude": 5}, "nodes_to_exclude"),
        ({"seeds": {"data": 1 << 80}}, "'seeds.data'"),
    ],
    ids=str,
)
def test_a_card_asks_for_nothing_without_bounds(
    changes: dict[str, Any], message: str, card: tuple[Path, dict[str, Any]]
) -> None:
    with pytest.raises(QuarkError, match=message) as caught:
        reproduce(_changed_card(card, **changes))
    assert "small.json" in str(caught.value) or message == "random samples"


def test_a_card_does_not_lead_through_a_large_folder(
    card: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quark.onnx.quantization.reproduction.MOST_ENTRIES", 10)
    for i in range(11):
        (tmp_path / "many" / str(i)).mkdir(parents=True)
    changed_card = _changed_card(card, paths__data="../many", data__name="many", data__kind="folder")
    with pytest.raises(InvalidValueError, match="to be given by --calib, holds more than 10"):
        reproduce(changed_card)


@pytest.mark.parametrize("make", [file[0] for file in ODD_FILES[:3]], ids=ODD_IDS[:3])
@pytest.mark.parametrize("option", ["PlanFile", "data", "card"])
def test_a_card_names_nothing_that_never_ends(
    option: str, make: Callable[[Path], None], card: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(card[0].parent)
    make(Path("odd"))
    if option == "card":
        path = Path("odd")
    elif option == "data":
        Path("calib.npz").unlink()
        Path("odd").rename("calib.npz")
        path = card[0]
    else:
        path = _changed_card(card, config=_mixed_config(Path("odd")).to_dict())
    with pytest.raises(QuarkError):
        reproduce(path)


@pytest.mark.parametrize("metric", ["evil.py:f", "-evil.py:f", "os.path:exists"])
def test_a_card_runs_nobodys_code(
    metric: str, card: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(card[0].parent)
    Path("evil.py").write_text("open('ran', 'w')\ndef f(session): return 1")
    config = get_default_config("S16S16_MIXED_S8S8")
    config.extra_options["AutoMixprecision"].update(Metric=metric, MetricTarget=0.1)
    path = _changed_card(card, config=config.to_dict())
    for door in (lambda: reproduce(path), lambda: settings_from(read_card(path).card)):
        with pytest.raises(
            UnsupportedOptionError, match=r"extra_options\.AutoMixprecision\.Metric.*not run from a card"
        ):
            door()
    assert not Path("ran").exists()


def test_configs_written_here_are_read_again(tmp_path: Path) -> None:
    for config in (get_default_config("XINT8"), QConfig()):
        for suffix in (".yaml", ".json"):
            assert type(config).load(config.save(tmp_path / f"config{suffix}")).to_dict() == config.to_dict()
