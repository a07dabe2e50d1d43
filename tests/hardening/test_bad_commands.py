"""Mistakes on the command line, one row for each: the exit status, what has to be said, and a folder that is as it was.

Status 1 is an error of ours in one line; status 2 is a mistake that click finds. The folder holds m.onnx (float),
q.onnx (XINT8 of it, with q.json), mx.onnx (MXINT8), old.onnx (an output that was there before), data, broken configs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from broken_checks import OLD, command_refused, contents
from commands import run
from tiny_models import SIZE, save_brightness_model, save_images


@dataclass(frozen=True)
class Mistake:
    line: str
    words: tuple[str, ...]
    code: int = 1


CONFIG = "quantize m.onnx old.onnx --config"
SET = "quantize m.onnx old.onnx --set"
SEARCH = "search m.onnx --calib c.npz"

MISTAKES = (
    Mistake("quantize m.onnx m.onnx", ("'m.onnx' is the input model", "choose another name")),
    Mistake("quantize m.onnx no/where.onnx", ("there is no folder 'no'", "create it first")),
    Mistake("quantize m.onnx img", ("'img' is a folder", "expected the name of a file")),
    Mistake("quantize m.onnx x.json", ("'x.json'", "end it in .onnx")),
    Mistake("quantize m.onnx old.onnx --calib=", ("--calib", "the path is empty"), 2),
    Mistake("quantize m.onnx", ("Missing argument 'OUT'",), 2),
    Mistake("quantize m.onnx old.onnx --no-such", ("--no-such",), 2),
    Mistake("quantise m.onnx old.onnx", ("quantise", "quantize"), 2),
    Mistake(f"{CONFIG} XINT9", ("no preset 'XINT9'", "Did you mean XINT8", "quark presets")),
    Mistake(f"{CONFIG} none.yaml", ("config file 'none.yaml'", "No such file")),
    Mistake(f"{CONFIG} bad.yaml", ("config file 'bad.yaml'", "expected ',' or ']'")),
    Mistake(f"{CONFIG} list.yaml", ("config file 'list.yaml'", "expected a mapping")),
    Mistake(f"{CONFIG} unknown.yaml", ("config file 'unknown.yaml'", "'CLESteps'", "Known")),
    Mistake(f"{CONFIG} deep.json", ("config file 'deep.json'", "nested more than")),
    Mistake(f"{CONFIG} deep.yaml", ("config file 'deep.yaml'", "nested more than")),
    Mistake(f"{CONFIG} long.json", ("config file 'long.json'", "digits")),
    Mistake(f"{CONFIG} binary.yaml", ("config file 'binary.yaml'", "cannot be read")),
    Mistake(f"{CONFIG} python.yaml", ("config file 'python.yaml'", "is not read")),
    Mistake(f"{SET} CLESteps", ("KEY=VALUE",), 2),
    Mistake(f"{SET} CLEStep=2", ("no field or option 'CLEStep'", "Did you mean CLESteps")),
    Mistake(f"{SET} Percentile=high", ("'Percentile'", "'high'", "a number above 50")),
    Mistake(f"{SET} Percentile=300", ("'Percentile'", "300", "at most 100")),
    Mistake(f"{SET} MXAttributes.element_dtype=int9 --config MXINT8", ("element_dtype", "'int9'", "fp4_e2m1")),
    Mistake(f"{SET} MXAttributes.block_size=0 --config MXINT8", ("block_size", "at least 1")),
    Mistake("quantize m.onnx old.onnx --num-calib 0", ("--num-calib", "x>=1"), 2),
    Mistake("quantize m.onnx old.onnx --calib img --preprocess imagnet", ("'imagnet'", "Did you mean imagenet")),
    Mistake("quantize m.onnx old.onnx --calib img --preprocess bad.yaml", ("preprocessing file bad.yaml",)),
    Mistake("quantize m.onnx old.onnx --pack fast", ("'fast' is not a profile", "portable"), 2),
    Mistake("quantize m.onnx old.onnx --max-drop -1", ("--max-drop", "x>=0"), 2),
    Mistake("quantize m.onnx old.onnx --data img", ("--data is for --max-drop",), 2),
    Mistake("quantize m.onnx old.onnx --max-drop 1 --data nowhere", ("data 'nowhere'", "no such folder")),
    Mistake("quantize m.onnx old.onnx --random --report no/page.html", ("'no/page.html'", "there is no folder 'no'")),
    Mistake("evaluate m.onnx", ("--data",), 2),
    Mistake("evaluate m.onnx --data nowhere", ("data 'nowhere'", "expected a folder of images")),
    Mistake("evaluate m.onnx --data img --limit 0", ("--limit", "x>=1"), 2),
    Mistake("evaluate m.onnx --data img/a_dark --labels names.txt", ("labels file 'names.txt'", "'000.png'", "number")),
    Mistake("evaluate m.onnx --data img/a_dark --labels no.txt", ("labels file 'no.txt'", "cannot be read")),
    Mistake("evaluate empty --data img", ("'empty' is empty", "Expected an ONNX model")),
    Mistake("compare m.onnx none.onnx --data img", ("model 'none.onnx'", "no such file")),
    Mistake("report q.onnx", ("--float",), 2),
    Mistake("report q.onnx --float q.onnx --random", ("'q.onnx' is quantized", "expected the float model")),
    Mistake("report q.onnx --float none.onnx", ("'none.onnx'", "no such file")),
    Mistake("report q.onnx --float m.onnx -o no/p.html", ("'no/p.html'", "create it first")),
    Mistake("report q.onnx --float m.onnx -o m.onnx", ("'m.onnx'", "ends in .html")),
    Mistake("debug q.onnx m.onnx", ("'q.onnx' is quantized", "give the float model first")),
    Mistake("search m.onnx", ("--calib",), 2),
    Mistake(f"{SEARCH} --out s --budget size=10", ("budget 'size=10'", "size=10MB")),
    Mistake(f"{SEARCH} --out s --presets XINT9", ("no preset 'XINT9'", "XINT8")),
    Mistake(f"{SEARCH} --out s --formats int9", ("'int9'", "Did you mean int8")),
    Mistake(f"{SEARCH} --out img", ("folder 'img' holds other things", "--out")),
    Mistake(f"{SEARCH} --out m.onnx", ("folder 'm.onnx'", "--out")),
    Mistake("search q.onnx --calib c.npz --out s", ("already quantized", "float model")),
    Mistake("reproduce m.onnx", ("model 'm.onnx' has no card", "quark.card")),
    Mistake("reproduce none.json", ("card 'none.json'", "no such file")),
    Mistake("reproduce bad.json", ("card 'bad.json' is not valid JSON",)),
    Mistake("reproduce deep.json", ("card 'deep.json' is nested",)),
    Mistake("reproduce card.json", ("'card.json'", "version 99", "update")),
    Mistake("reproduce q.json --model none.onnx", ("'none.onnx'", "no such file")),
    Mistake("reproduce q.json --output no/x.onnx", ("'no/x.onnx'", "create it first")),
    Mistake("pack m.onnx p.onnx", ("nothing to pack", "Quantize the model first")),
    Mistake("pack q.onnx p.onnx", ("nothing to pack", "no weight is in a block format")),
    Mistake("pack mx.onnx mx.onnx", ("'mx.onnx' is the input model",)),
    Mistake("pack mx.onnx no/p.onnx", ("there is no folder 'no'",)),
    Mistake("pack mx.onnx p.onnx --profile tiny", ("'tiny'", "portable"), 2),
    Mistake("unpack mx.onnx u.onnx", ("'mx.onnx' is not packed", "nothing to unpack")),
    Mistake("inspect empty", ("'empty' is empty", "Expected an ONNX model")),
    Mistake("inspect img", ("'img'", "it is a folder")),
    Mistake("lint none.onnx", ("'none.onnx'", "Expected an ONNX model")),
    Mistake("presets XINT9", ("no preset 'XINT9'", "XINT8")),
    Mistake("formats intt8", ("'intt8'", "Did you mean int8")),
    Mistake("formats --weights empty", ("'empty'", "ends in .onnx or .npz")),
    Mistake("prepare-data nowhere cal", ("folder 'nowhere'", "no such folder")),
    Mistake("prepare-data img img/cal", ("'img/cal' is inside 'img'",)),
    Mistake("prepare-data img m.onnx", ("'m.onnx' is a file",)),
    Mistake("prepare-data img/a_dark cal", ("'000.png'", "no file of labels", "--labels")),
    Mistake("prepare-data img/a_dark cal --labels names.txt", ("labels file 'names.txt'", "1 lines for 2 images")),
    Mistake("doctor --no-such", ("--no-such",), 2),
    Mistake("quantize-torch --model_name resnet18 --pretrained no.pth --data_dir img", ("weights 'no.pth'", "no such")),
    Mistake("quantize-torch --model_name resnet99 --pretrained no.pth --data_dir img", ("'resnet99'", "Did you mean")),
    Mistake("quantize-llm none out", ("'none'", "expected a folder with config.json and safetensors")),
    Mistake("quantize-llm img", ("missing argument OUT",), 2),
    Mistake("advanced-quantize --model_input none.onnx --model_output o.onnx", ("'none.onnx'", "no such file")),
)


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder, made once."""
    folder = tmp_path_factory.mktemp("kitchen")
    save_brightness_model(folder / "m.onnx")
    save_images(folder / "img", 2)
    np.savez(folder / "c.npz", input=np.zeros((4, 3, SIZE, SIZE), np.float32))
    for name, config in (("q", "XINT8"), ("mx", "MXINT8")):
        made = ["quantize", folder / "m.onnx", folder / f"{name}.onnx", "--calib", folder / "c.npz", "--config", config]
        assert run(*made).exit_code == 0
    (folder / "old.onnx").write_bytes(OLD)
    texts = {
        "bad.yaml": "a: [1",
        "list.yaml": "- 1",
        "unknown.yaml": "CLESteps: 3",
        "deep.json": "[" * 3000,
        "deep.yaml": "[" * 3000,
        "long.json": "1" * 5000,
        "python.yaml": "a: !!python/object/apply:os.getcwd []",
        "bad.json": "{",
        "card.json": '{"card": {"version": 99}}',
        "names.txt": "000.png",
        "empty": "",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    return folder


@pytest.fixture
def place(kitchen: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder, as the one where the command is given; a mistake that changes it is put right for the next one."""
    before = contents(kitchen)
    kept = kitchen.with_name(f"{kitchen.name}-kept")
    if not kept.exists():
        shutil.copytree(kitchen, kept)
    monkeypatch.chdir(kitchen)
    yield kitchen
    if contents(kitchen) != before:
        shutil.rmtree(kitchen)
        shutil.copytree(kept, kitchen)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.line)
def test_is_told_and_changes_nothing(mistake: Mistake, place: Path) -> None:
    command_refused(place, mistake.line.split(), mistake.words, mistake.code)
    assert os.getcwd() == str(place)


def test_there_are_many() -> None:
    assert len({mistake.line for mistake in MISTAKES}) == len(MISTAKES) >= 60
