"""What quark prints: names steer no terminal, suggested commands can be pasted, and any stdout and stderr will do.

The network here has hostile names everywhere: quotes and commands for a shell, escape sequences, markup of rich, line
breaks. Every command line of quark runs on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import subprocess
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from commands import run
from tiny_models import save_brightness_model

from quark.cli.main import main
from quark.errors import InvalidValueError, ModelError, OutputError
from quark.inspect.diagnose import diagnose
from quark.onnx import get_default_config, quantize
from quark.onnx.quantization.suggestions import try_all
from quark.text import PrintableStream, get_logger, printable, setting, shell_command

QUARK = (sys.executable, "-c", "from quark.cli.main import main; main()")
STEERING = "\x1b[2J\x1b[31m\x1b]0;title\x07\x1b]8;;http://x\x07\r\b\x7f\x9b1m\u202e\u200b\u2028\ufeff\U000e0041[red]x[/red]\nforged"
SHELL_NAMES = (
    "fc'; touch INJECTED; echo '",
    'fc"; touch INJECTED; echo "',
    "$(touch INJECTED)`touch INJECTED`",
    "a\ntouch INJECTED\nb",
    "block --config 'x'; touch INJECTED #",
    "a\\'; touch INJECTED #\x1b",
    "tab\tand !history",
    "-rf",
    "*?[a]~ {a,b}",
    "caf\xe9 \u65e5\u672c \U0001f600 \U000e0041",
    STEERING,
)
WIDTH, SAMPLES = 32, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A float network with hostile names that 8 bits break, three quantized files of it, and data."""
    place = tmp_path_factory.mktemp("hostile")
    generator = np.random.default_rng(0)
    text = (
        f'<ir_version: 8, opset_import: ["": 17]> g (float[1, 12, {WIDTH}] x) => (float[1, 12, 40] y) '
        "{ t = MatMul (x, a)  h = Relu (t)  u = MatMul (h, b)  boxes = Mul (u, scale)"
        "  v = MatMul (h, c)  w = Add (v, shift)  scores = Sigmoid (w)  y = Concat <axis = 2> (boxes, scores) }"
    )
    model = onnx.parser.parse_model(text)
    weights = {
        "a": generator.normal(0, 0.2, (WIDTH, WIDTH)),
        "b": generator.normal(0, 0.2, (WIDTH, 8)),
        "c": generator.normal(0, 2.0, (WIDTH, WIDTH)),
        "scale": np.array(400.0),
        "shift": np.array(-9.0),
    }
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), hostile(name)))
    for number, node in enumerate(model.graph.node):
        node.name = f"{SHELL_NAMES[number % len(SHELL_NAMES)]}/{number}{STEERING}"
        node.input[:], node.output[:] = map(hostile, node.input), map(hostile, node.output)
    for value in (*model.graph.input, *model.graph.output):
        value.name = hostile(value.name)
    model.graph.name = model.producer_name = model.doc_string = STEERING
    model.metadata_props.add(key=STEERING, value=STEERING)
    onnx.save(model, place / "float.onnx")
    unknown = onnx.ModelProto.FromString(model.SerializeToString())
    unknown.graph.node[1].op_type, unknown.graph.node[1].domain = f"Op{STEERING}", f"domain{STEERING}"
    onnx.save(unknown, place / "unknown.onnx")
    data = generator.normal(0, 1, (SAMPLES, 12, WIDTH)).astype(np.float32)
    np.savez(place / "data.npz", **{hostile("x"): data})
    config = get_default_config("INT8_CNN_DEFAULT")
    config.extra_options["Protect"] = "none"
    quantize(place / "float.onnx", data, config).save(place / "broken.onnx")
    quantize(place / "float.onnx", data, "MXINT8").save(place / "mx.onnx")
    return place


def hostile(name: str) -> str:
    return f"{name}'; touch INJECTED; echo '{STEERING}"


# ---------------------------------------------------------------- commands that are suggested
def arguments_in_bash(commands: list[str], place: Path) -> list[list[str]]:
    """What a stub called quark is given by each command. Nothing else may have been run."""
    script = 'quark() { printf \'%s\\0\' "$#" "$@"; }\n' + "\n".join(commands)
    done = subprocess.run(["bash", "-c", script], cwd=place, capture_output=True, check=True)
    assert done.stderr == b""
    assert os.listdir(place) == []
    parts = [os.fsdecode(part) for part in done.stdout.split(b"\0")[:-1]]
    found = []
    while parts:
        count = int(parts[0])
        found.append(parts[1 : count + 1])
        del parts[: count + 1]
    return found


def test_a_shell_gives_back_the_arguments(tmp_path):
    names = [*SHELL_NAMES, "", "plain", os.fsdecode(b"not utf-8 \xff"), "'", "\\", "!!", "$'a'"]
    command = shell_command(["quark", *names])
    assert command.isprintable()
    assert arguments_in_bash([command], tmp_path) == [names]
    assert shell_command(["quark", Path("-rf"), "-rf"]) == "quark ./-rf -rf"


@pytest.mark.parametrize(
    "value", [[*SHELL_NAMES], {name: [{"a": 1}] for name in SHELL_NAMES}, True, 3, "QuantType.QInt8"]
)
def test_set_reads_what_setting_writes(value):
    text = setting("key", value)
    assert text.isprintable()
    assert text.startswith("key=")
    assert yaml.safe_load(text.removeprefix("key=")) == value


def test_every_suggested_command_can_be_pasted(folder, tmp_path):
    known = {node.name for node in onnx.load(folder / "float.onnx").graph.node}
    tensors = {name for node in onnx.load(folder / "float.onnx").graph.node for name in (*node.input, *node.output)}
    paths = folder / "float.onnx", folder / "broken.onnx", folder / "data.npz"
    diagnosis = diagnose(*paths, num_samples=SAMPLES)
    tried = try_all(diagnosis, *paths, seconds=60)
    shown = [step.arguments for step in (*diagnosis.steps, *tried.steps)]
    shown += [suggestion.arguments for suggestion in tried.suggestions]
    shown += [remedy.arguments for layer in diagnosis.layers for remedy in layer.remedies]
    quoted = sorted({each for each in shown if each})
    assert any("nodes_to_exclude" in each for each in quoted)
    assert any("TensorQuantOverrides" in each for each in quoted)
    assert all(each.isprintable() for each in quoted)
    names = set()
    for arguments in arguments_in_bash([f"quark quantize {each}" for each in quoted], tmp_path):
        assert arguments[0] == "quantize"
        assert set(arguments[1::2]) <= {"--set", "--config"}
        for change in arguments[2::2]:
            key, _, value = change.partition("=")
            if key == "nodes_to_exclude":
                names |= {name for name in yaml.safe_load(value) if not name.endswith(".*")}
            elif key == "TensorQuantOverrides":
                assert set(yaml.safe_load(value)) <= tensors
            else:
                assert change.isascii(), change
    assert names
    assert names <= known


def test_commands_in_printed_text_and_json_are_those_of_the_report(folder, tmp_path, tmp_path_factory):
    place = tmp_path / "it's; touch INJECTED\n"
    place.mkdir()
    model, source = place / "-q.onnx", place / "float'\x1b.onnx"
    source.write_bytes((folder / "float.onnx").read_bytes())
    data = place / "data \x9b'.npz"
    data.write_bytes((folder / "data.npz").read_bytes())
    assert run("quantize", source, model, "--calib", data, "--config", "S8S8_AAWS").exit_code == 0
    report = run("report", model, "--float", source, "--calib", data, "--no-try", "--json")
    making = json.loads(report.stdout)["making"]
    debug = run("debug", source, model, "--calib", data, "--no-try")
    options = [line.partition(": --set ")[2] for line in debug.stdout.splitlines() if ": --set " in line]
    found = run("search", source, "--calib", data, "--presets", "BF16", "--out", place / "found")
    best = next(line for line in found.stdout.splitlines() if line.startswith("best:")).partition("quark ")[2]
    commands = [making["command"], making["report_command"], making["made_by"], f"quark {best}"]
    empty = tmp_path_factory.mktemp("empty")
    given = arguments_in_bash([*commands, *(f"quark --set {option}" for option in options)], empty)
    assert given[0] == ["reproduce", "./-q.json"]
    assert given[1][:4] == ["report", "./-q.onnx", "--float", source.name]
    assert given[1][given[1].index("--calib") + 1] == data.name
    assert given[2][:2] == ["quantize", source.name]
    assert given[3][:4] == ["quantize", str(source), "float'\x1b_BF16.onnx", "--config"]
    assert options
    for arguments in given[4:]:
        assert arguments[0] == "--set"
        assert len(arguments) == 2


# ---------------------------------------------------------------- what reaches the terminal
def assert_printable(text: str, allowed: str = "") -> None:
    """No control character, no formatting character and no line separator, apart from line breaks and `allowed`."""
    rest = re.sub(allowed, "", text) if allowed else text
    odd = {each for each in rest if each != "\n" and unicodedata.category(each) in ("Cc", "Cf", "Zl", "Zp", "Cs", "Co")}
    assert not odd, (odd, text)
    assert not any(line.strip(" |\u2503").startswith("forged") for line in text.splitlines()), text


HOSTILE_VALUE = f"value{STEERING}"
FLOAT, BROKEN, DATA = "float.onnx", "broken.onnx", "data.npz"
VERBS = {
    "quantize": (FLOAT, "out\x1b.onnx", "--calib", DATA, "--config", "XINT8"),
    "quantize-torch": ("--model_name", HOSTILE_VALUE, "--pretrained", HOSTILE_VALUE, "--data_dir", HOSTILE_VALUE),
    "quantize-llm": (HOSTILE_VALUE, "out\x1b", "--scheme", HOSTILE_VALUE),
    "evaluate": (FLOAT, "--data", DATA),
    "compare": (FLOAT, BROKEN, "--data", DATA),
    "convert": ("opset-version", FLOAT, "18", "converted\x1b.onnx"),
    "report": (BROKEN, "--float", FLOAT, "--calib", DATA, "--no-try", "-o", "page\x1b.html"),
    "debug": (FLOAT, BROKEN, "--calib", DATA, "--no-try"),
    "search": (FLOAT, "--calib", DATA, "--presets", "BF16", "--out", "found\x1b"),
    "reproduce": ("mx.json", "--model", FLOAT, "--calib", DATA),
    "pack": ("mx.onnx", "packed\x1b.onnx"),
    "unpack": ("packed\x1b.onnx", "unpacked\x1b.onnx"),
    "inspect": (FLOAT,),
    "lint": (BROKEN,),
    "presets": (HOSTILE_VALUE,),
    "formats": ("mxint8", "--weights", FLOAT),
    "prepare-data": (HOSTILE_VALUE, "calib"),
    "advanced-quantize": ("--model_input", FLOAT, "--model_output", "o.onnx", "--calib_data", HOSTILE_VALUE),
    "doctor": (),
    "demo": (HOSTILE_VALUE,),
}
MISTAKES = (
    ("inspect", HOSTILE_VALUE),
    ("inspect", FLOAT, HOSTILE_VALUE),
    (HOSTILE_VALUE,),
    ("inspect", f"--{HOSTILE_VALUE}"),
    ("quantize", "unknown.onnx", "o.onnx", "--calib", DATA),
    ("quantize", FLOAT, "o.onnx", "--calib", DATA, "--config", HOSTILE_VALUE),
    ("quantize", FLOAT, "o.onnx", "--calib", DATA, "--set", HOSTILE_VALUE),
    ("quantize", FLOAT, "o.onnx", "--calib", DATA, "--set", f"{HOSTILE_VALUE}=1"),
    ("quantize", FLOAT, "o.onnx", "--calib", DATA, "--set", f"Percentile='{HOSTILE_VALUE}'"),
    ("quantize", FLOAT, "o.onnx", "--calib", DATA, "--preprocess", HOSTILE_VALUE),
    ("quantize", FLOAT, "o.onnx", "--calib", DATA, "--metric", HOSTILE_VALUE),
    ("quantize", FLOAT, "o.onnx", "--calib", HOSTILE_VALUE),
    ("formats", HOSTILE_VALUE),
    ("--debug", "quantize", "unknown.onnx", "o.onnx", "--calib", DATA),
)


def test_all_commands_are_covered():
    assert set(VERBS) == set(main.list_commands(None))


@pytest.mark.parametrize(
    "command", [*((verb, *rest) for verb, rest in VERBS.items()), *MISTAKES], ids=lambda c: c[0][:9]
)
def test_names_steer_no_terminal(folder, monkeypatch, capfd, command):
    monkeypatch.chdir(folder)
    result = run(*command)
    assert_printable(result.stdout)
    assert_printable(result.stderr)
    assert capfd.readouterr() == ("", "")  # native libraries print nothing either
    assert "this should not happen" not in result.stderr
    is_mistake = command in MISTAKES or HOSTILE_VALUE in command or command[0] == "evaluate"
    assert (result.exit_code in (1, 2)) == is_mistake, result.output
    if is_mistake and "--debug" not in command:
        assert len([line for line in result.stderr.splitlines() if line.startswith("Error: ")]) == 1


def test_json_keeps_exact_names(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for command in (("inspect", FLOAT), ("lint", BROKEN), ("debug", FLOAT, BROKEN, "--calib", DATA, "--no-try")):
        printed = run(*command, "--json").stdout
        assert_printable(printed)
        assert any(STEERING in str(part) for part in _strings(json.loads(printed)))


def _strings(content):
    if isinstance(content, dict):
        yield from content
        for value in content.values():
            yield from _strings(value)
    elif isinstance(content, list):
        for value in content:
            yield from _strings(value)
    else:
        yield content


COLOURS = r"\x1b\[[0-9;]*m|\r(?=\n)"  # a terminal adds the carriage return
ONE_BY_ONE = """
import json, sys
from quark.cli.main import main
for command in json.loads(sys.argv[1]):
    try:
        main(command, prog_name="quark")
    except SystemExit as end:
        print("status", end.code, flush=True)
"""
BAR = r"\x1b\[\?25[lh]|\x1b\[[0-9]*[AK]|\r"


def test_only_colours_reach_a_terminal(folder):
    """Of all that a terminal obeys; and the bar, which moves the cursor."""
    commands = [("lint", BROKEN), ("inspect", HOSTILE_VALUE), ("debug", FLOAT, BROKEN, "--calib", DATA, "--no-try")]
    reader, writer = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    program = [sys.executable, "-c", ONE_BY_ONE, json.dumps(commands)]
    process = subprocess.Popen(program, cwd=folder, env=environment, stdout=writer, stderr=writer)
    os.close(writer)
    output = b""
    with open(reader, "rb", buffering=0) as terminal, contextlib.suppress(OSError):  # Linux says so when it was closed
        while part := terminal.read(65536):
            output += part
    assert process.wait() == 0
    text = output.decode()
    assert [int(code) for code in re.findall(r"status (\d)", text)] == [3, 1, 0]
    assert text.count("\\x1b[31m") > len(commands)
    assert "\x1b[1m" in text
    assert_printable(text, f"{COLOURS}|{BAR}")
    assert "\x1b[31m\x1b" not in text
    assert "\x1b[2J" not in text


def test_errors_are_printable_and_arguments_exact():
    for kind in (InvalidValueError, ModelError, OutputError):
        error = kind(f"tensor '{STEERING}'")
        assert str(error) == f"tensor '{printable(STEERING)}'"
        assert error.args == (f"tensor '{STEERING}'",)
        assert str(kind(str(error))) == str(error)


def test_line_breaks_of_a_cause_are_joined():
    error = ModelError("model 'a\nb': line 1\n  line 2; export it again")
    error.__cause__ = ValueError("line 1\n  line 2")
    assert str(error) == "model 'a\\nb': line 1 line 2; export it again"


def test_log_messages_are_printable(caplog):
    get_logger("quark.for_a_test").warning("node '%s'", STEERING)
    assert caplog.records[0].getMessage() == f"node '{printable(STEERING)}'"


def test_colours_pass_to_terminals_alone(monkeypatch, tmp_path):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    with open(tmp_path / "out.txt", "w+", encoding="utf-8") as file:
        PrintableStream(file, "standard output").write("\x1b[1mok\x1b[0m\n\x1b[2J")
        monkeypatch.setenv("FORCE_COLOR", "1")
        PrintableStream(file, "standard output").write("\x1b[1mok\x1b[0m\n\x1b[2J")
    text = (tmp_path / "out.txt").read_text(encoding="utf-8")
    assert text == "\\x1b[1mok\\x1b[0m\n\\x1b[2J\x1b[1mok\x1b[0m\n\\x1b[2J"


# ---------------------------------------------------------------- streams of all kinds
@dataclass(frozen=True)
class Streams:
    """How a command is started, its exit status, and what it says on stderr where that can be seen."""

    redirection: str
    code: int = 0
    message: str = ""


@pytest.mark.parametrize(
    "streams",
    [
        Streams("2>&-"),
        Streams(">&- 2>/dev/full"),
        Streams("<&- >&- 2>&-"),
        Streams(">/dev/full", 1, "Error: standard output: No space left on device\n"),
        Streams("| head -c 0", 1),
    ],
    ids=lambda each: each.redirection,
)
def test_files_are_complete_whatever_the_streams(tmp_path, streams):
    save_brightness_model(tmp_path / "m.onnx")
    np.savez(tmp_path / "c.npz", input=np.random.default_rng(0).random((4, 3, 16, 16), np.float32))
    command = shlex.join([*QUARK, "quantize", "m.onnx", "o.onnx", "--calib", "c.npz", "--config", "MXINT8"])
    script = f"{command} {streams.redirection}\nexit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == streams.code, done.stderr
    assert done.stderr == streams.message
    onnx.checker.check_model(str(tmp_path / "o.onnx"))
    assert json.loads((tmp_path / "o.json").read_text())["result"]["bytes"] == (tmp_path / "o.onnx").stat().st_size


def test_names_beyond_ascii_on_an_ascii_stdout(tmp_path):
    path = tmp_path / "caf\xe9.onnx"
    save_brightness_model(path)
    proto = onnx.load(path)
    for node in proto.graph.node:
        node.name += "\u65e5\u672c"
        node.output[:] = ["\xe9" if name == "logits" else name for name in node.output]
    proto.graph.output[0].name = "\xe9"
    onnx.save(proto, path)
    np.savez(tmp_path / "c.npz", input=np.random.default_rng(0).random((4, 3, 16, 16), np.float32))
    others = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHONIO"))}

    def printed(command, **environment):
        how = {"cwd": tmp_path, "env": {**others, **environment}, "stdout": subprocess.PIPE, "timeout": 120}
        done = subprocess.run([*QUARK, *command], check=True, **how)
        assert done.stdout.isascii()
        return done.stdout.decode()

    options = ("o.onnx", "--calib", "c.npz", "--config", "XINT8")
    text = printed(("quantize", path.name, *options), LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert "output '\\xe9'" in text
    assert (tmp_path / "o.onnx").is_file()
    assert "caf\\xe9.onnx" in printed(("inspect", path.name), LC_ALL="C", PYTHONIOENCODING="ascii")
