"""Cards survive JSON, hold nothing of where they were made inside the model, and refuse what is no card."""

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

from quark.account import FileFacts
from quark.card import Card, DataFacts, DataKind, differences, relative_path, samples_digest
from quark.errors import InvalidValueError
from quark.onnx.quantization import making
from quark.onnx.quantization.config.config import QuantizationConfig, get_default_config
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.making import _changes, command_of, preset_and_changes, set_arguments
from quark.onnx.quantization.presets import PRESETS

SHA = "0123456789abcdef" * 4
LONG = "A" * (2 << 20)
DEEP = json.loads('{"a":' * 900 + "1" + "}" * 900)


@pytest.fixture
def card():
    return Card(
        source=FileFacts("float.onnx", 1000, SHA),
        config_name="XINT8",
        config=settings_of("XINT8").config,
        data=DataFacts(DataKind.FOLDER, "calib", 16, 2, {"mean": [0.5]}, 14, 2, SHA),
        versions={"quark": "1.0", "numpy": "2.0"},
        plan_sha256=SHA,
        seeds={"finetuning": 7},
        platform={"machine": "x86_64"},
        command="quark quantize float.onnx OUT.onnx",
        paths={"source": "../float.onnx", "data": "calib"},
        result=FileFacts("small.onnx", 500, SHA),
    )


def test_survives_json(card):
    assert Card.from_json(card.to_json()) == card
    assert Card.from_json(card.inside().to_json()) == card.inside()
    assert Card.from_json(card.to_json()).to_json() == card.to_json()


def test_what_the_model_holds_does_not_tell_where_it_was_made(card):
    elsewhere = replace(
        card,
        source=replace(card.source, name="copy.onnx"),
        data=replace(card.data, name="images"),
        platform={"machine": "arm64"},
        command="other",
        paths={},
        result=None,
    )
    assert elsewhere.inside().to_json() == card.inside().to_json()
    for word in ("float.onnx", 'calib"', "x86_64", "small.onnx", "../"):
        assert word not in card.inside().to_json()


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("version",), 2),
        (("version",), None),
        (("unknown",), 1),
        (("source",), "float.onnx"),
        (("source", "sha256"), "abc"),
        (("source", "sha256"), SHA.upper()),
        (("source", "name"), "../../etc/passwd"),
        (("source", "name"), "a\\b"),
        (("source", "bytes"), -1),
        (("source", "bytes"), True),
        (("data", "kind"), "pickle"),
        (("data", "count"), 0),
        (("data", "batch_size"), "1"),
        (("data", "more"), 1),
        (("data", "preprocessing"), {"divisor": "1"}),
        (("data", "preprocessing"), {"mean": [1, [2]]}),
        (("config",), []),
        (("versions", "numpy"), 2),
        (("functions",), "f"),
        (("paths",), {"source": "/etc/passwd"}),
        (("paths",), {"source": "C:\\x"}),
        (("paths",), {"elsewhere": "x"}),
        (("result",), {"name": "x"}),
        (("plan_sha256",), ""),
        (("source", "name"), "a" * 5000),
        (("result", "name"), "."),
        (("paths",), {"source": "a" * 5000}),
        (("config", "extra_options"), DEEP),
        (("command",), LONG),
        (("version",), LONG),
        ((LONG,), 1),
        (("data", LONG), 1),
        (("data", "kind"), LONG),
        (("source", "name"), f"{LONG}/"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refuses_what_is_no_card(card, where, value):
    content = json.loads(card.to_json())
    place = content
    for part in where[:-1]:
        place = place[part]
    place[where[-1]] = value
    with pytest.raises(InvalidValueError, match="card") as caught:
        Card.from_json(json.dumps(content))
    assert len(str(caught.value)) < 400


def test_what_is_no_card_at_all_is_called_that():
    with pytest.raises(InvalidValueError, match="contains no card"):
        Card.from_dict({"name": "package"})


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '"card"', "[" * 100000])
def test_refuses_other_texts(text):
    with pytest.raises(InvalidValueError, match="card"):
        Card.from_json(text)


@pytest.mark.parametrize("name", ["source", "config", "data", "versions", "plan_sha256", "packing"])
def test_nothing_may_be_missing(card, name):
    content = json.loads(card.to_json())
    del content[name]
    with pytest.raises(InvalidValueError, match=name):
        Card.from_dict(content)


def test_differences_are_named(card):
    other = replace(card, versions={"quark": "1.0", "numpy": "2.1"}, platform={"machine": "arm64"})
    assert differences(card, card) == []
    assert differences(card, other) == ["platform.machine: x86_64, now arm64", "versions.numpy: 2.0, now 2.1"]


def test_the_digest_sees_names_types_shapes_order_and_part():
    x, y = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    variants = [
        samples_digest([{"x": x}, {"x": y}]),
        samples_digest([{"x": y}, {"x": x}]),
        samples_digest([{"x": x}], [{"x": y}]),
        samples_digest([{"z": x}, {"x": y}]),
        samples_digest([{"x": x.view(np.int32)}, {"x": y}]),
        samples_digest([{"x": x.reshape(2, 2)}, {"x": y}]),
        samples_digest([{"x": x}]),
        samples_digest([]),
    ]
    assert len(set(variants)) == len(variants)
    assert samples_digest([{"x": x.reshape(2, 2).T}]) == samples_digest(
        [{"x": np.ascontiguousarray(x.reshape(2, 2).T)}]
    )


def test_paths_are_relative(tmp_path):
    (tmp_path / "a").mkdir()
    assert relative_path(tmp_path / "a" / "x.onnx", tmp_path / "b") == "../a/x.onnx"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_found_by_its_config_and_made_of_it_again(name):
    settings = settings_of(name)
    assert preset_and_changes(settings.config) == (name, ())
    again = settings_of(QuantizationConfig.from_dict(dict(settings.config)))
    assert (again.name, again.config) == (settings.name, settings.config)


@pytest.fixture(scope="module")
def dictionaries():
    return {name: get_default_config(name).to_dict() for name in PRESETS}


EDITS = {
    "none": lambda config: None,
    "fields": lambda config: config.update(per_channel=not config["per_channel"], nodes_to_exclude=["a", "b"]),
    "an option more": lambda config: config["extra_options"].setdefault("WeightsOnly", True),
    "options of other presets": lambda config: config["extra_options"].update(
        BiasCorrection=True, Protect="auto", ActivationSymmetric=True, CLESteps=1
    ),
    "other values": lambda config: config.update(extra_options=changed_values(config["extra_options"])),
    "an option less": lambda config: config["extra_options"].pop(next(iter(config["extra_options"]), ""), None),
    "no options": lambda config: config["extra_options"].clear(),
    "too many": lambda config: config["extra_options"].update({f"Option{number}": number for number in range(13)}),
    "no mapping": lambda config: config.update(extra_options=None),
    "a field less": lambda config: config.pop("per_channel"),
}


def changed_values(options):
    return {
        key: changed_values(value) if isinstance(value, dict) else [value, "changed"] for key, value in options.items()
    }


@pytest.mark.parametrize("edit", EDITS)
def test_the_nearest_preset_is_the_one_that_a_comparison_with_all_finds(edit, dictionaries):
    for content in dictionaries.values():
        config = copy.deepcopy(content)
        EDITS[edit](config)
        compared = [
            (len(changes), number, name, changes)
            for number, (name, base) in enumerate(dictionaries.items())
            if (changes := _changes(base, config)) is not None and len(changes) <= 12
        ]
        assert preset_and_changes(config) == (min(compared)[2:] if compared else None)


@pytest.mark.parametrize("name", ["XINT8", "MATMUL_NBITS", "BF16_MIXED_MXINT8_ADAQUANT"])
def test_few_presets_are_compared_to_find_the_nearest(name, dictionaries, monkeypatch):
    compared = []

    def counted(base, config):
        compared.append(base)
        return _changes(base, config)

    monkeypatch.setattr(making, "_changes", counted)
    assert preset_and_changes(dictionaries[name]) == (name, ())
    assert dictionaries[name] in compared
    assert len(compared) < 6


def test_the_command_says_presets_changes_and_data(card):
    config = get_default_config("XINT8")
    config.extra_options["CLESteps"] = 3
    config.nodes_to_exclude = ["a b"]
    changed = replace(card, config=settings_of(config).config, packing="portable")
    command = command_of(replace(changed, data=replace(card.data, preprocessing={})))
    assert command == (
        "quark quantize float.onnx OUT.onnx --config XINT8 --set 'nodes_to_exclude=[a b]' --set CLESteps=3 "
        "--calib calib --num-calib 16 --batch-size 2 --pack portable"
    )
    assert "--preprocess preprocessing.yaml" in command_of(card)


def test_a_config_that_leaves_things_out_is_a_file():
    config = QuantizationConfig()
    config.nodes_to_exclude = ["x"]
    for number in range(13):
        setattr(config, ("per_channel", "reduce_range")[number % 2], True)
    config.extra_options = {"CLESteps": number}
    found = preset_and_changes(settings_of(config).config)
    assert found is None or len(found[1]) > 0


def test_values_of_set_are_yaml_on_one_line():
    assert set_arguments((("a", True), ("b", "QuantType.QInt8"), ("c", {"d": [1, 2]}))) == [
        *("--set", "a=true", "--set", "b=QuantType.QInt8", "--set", "c={d: [1, 2]}")
    ]
