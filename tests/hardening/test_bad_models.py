"""Models that cannot be quantized, through the Python API and the commands that read models.

For each of them: an error that names the file and the culprit, one line on stderr and status 1, no output, no temporary
name, and an output that was there before is as it was.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_checks import OLD, command_refused, refused, untouched
from broken_models import BROKEN_MODELS, BrokenModel
from commands import run

from quark.errors import QuarkError
from quark.onnx import ModelQuantizer, QConfig

ANY = pytest.mark.parametrize("broken", BROKEN_MODELS, ids=lambda broken: broken.name)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with an output of an earlier run in it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "out.onnx").write_bytes(OLD)
    (tmp_path / "model" / "out.json").write_bytes(OLD)
    return tmp_path / "model"


@ANY
def test_quantize_refuses_it(broken: BrokenModel, place: Path) -> None:
    path = broken.make(place)
    quantizer = ModelQuantizer(QConfig.get_default_config("XINT8"))
    with untouched(place.parent):
        refused(lambda: quantizer.quantize_model(path, place / "out.onnx", None), QuarkError, broken.words)


@ANY
def test_the_command_says_so_in_one_line(broken: BrokenModel, place: Path) -> None:
    path = broken.make(place)
    command_refused(place.parent, ["quantize", path, place / "out.onnx", "--random"], broken.words)


@ANY
def test_no_other_command_stumbles_over_it(broken: BrokenModel, place: Path) -> None:
    """They look at other things, and may find nothing wrong: then they do their work, else they say so in one line."""
    path = broken.make(place)
    for command in ("inspect", "lint", "report", "debug", "evaluate", "reproduce"):
        with untouched(place.parent):
            result = run(*_arguments(command, path))
        assert result.exit_code in FINDINGS.get(command, (1,)), (command, result.output)
        assert "Traceback" not in result.output
        assert "should not happen" not in result.output, (command, result.output)
        assert result.exit_code != 1 or len(result.stderr.strip().splitlines()) == 1, (command, result.stderr)
    for command in ("pack", "unpack"):
        command_refused(place.parent, [command, path, place / "new.onnx"], ())


# what may come out of a command that only looks at the file; the others cannot do anything with it
FINDINGS = {"inspect": (0, 1), "lint": (0, 1, 3)}


def _arguments(command: str, path: Path) -> list[object]:
    more = {
        "report": ["--float", path, "--random"],
        "debug": [path, "--random"],
        "evaluate": ["--data", path.with_name("none.npz")],
    }
    return [command, path, *more.get(command, [])]
