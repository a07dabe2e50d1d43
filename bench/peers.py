"""Other quantizers, each in a virtual environment that is made on first use, and which of our presets they have.

    --peers amd-quark onnxruntime nncf      the default; `--peers none` for ours alone
    --peers amd-quark=PYTHON                an interpreter that has it already
    --environments DIR                      where environments are made, and found again

An environment is made under a temporary name and renamed when it is whole; a file in it says what it was made of, and
when the pins here change it is made anew. A peer that cannot be installed or imported leaves blank cells.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.child import NO_EQUIVALENT, ChildError, Interpreters, last_words
from bench.record import say

ENVIRONMENTS = Path(__file__).resolve().parents[1] / ".venv-peers"
STAMP = "made_of.json"
PIP = ("-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check", "--progress-bar", "off")
IMPORT_SECONDS = 600  # AMD Quark compiles its operators when it is first imported


def static_settings(activation: str, weight: str, method: str, /, **options: Any) -> dict[str, Any]:
    """For quantize_static; weights have a scale for each channel unless they are unsigned, as in our presets."""
    types = {"activation": activation, "weight": weight, "method": method}
    return {**types, "per_channel": weight != "QUInt8", "options": options}


# in the words of onnxruntime.quantization; ranges by its own defaults, which do better than its moving average
_ONNXRUNTIME = {
    "A8W8": static_settings("QInt8", "QInt8", "MinMax", ActivationSymmetric=True),
    "A16W8": static_settings("QInt16", "QInt8", "MinMax", ActivationSymmetric=True),
    "S8S8_AAWS": static_settings("QInt8", "QInt8", "Percentile", CalibPercentile=99.9999),
    "U8S8_AAWS": static_settings("QUInt8", "QInt8", "Percentile"),
    "U8U8_AAWA": static_settings("QUInt8", "QUInt8", "Percentile", WeightSymmetric=False),
    "U16S8_AAWS": static_settings("QUInt16", "QInt8", "Percentile"),
    "S16S8_ASWS": static_settings("QInt16", "QInt8", "Percentile", ActivationSymmetric=True),
    "INT8_CNN_DEFAULT": static_settings("QUInt8", "QInt8", "MinMax"),
    "INT16_CNN_DEFAULT": static_settings("QUInt16", "QInt16", "MinMax"),
    "UINT8_DYNAMIC_QUANT": {"weight": "QUInt8", "method": "dynamic"},
}
# in the words of nncf.quantize: symmetric activations, or asymmetric ones
_NNCF = {"A8W8": {"preset": "performance"}, "INT8_CNN_DEFAULT": {"preset": "mixed"}}


@dataclass(frozen=True)
class Peer:
    """A quantizer of others: what it is called, what is installed, in which steps, and what shows that it is there.

    `equivalents` has the settings for each of our presets that it can do; None where it has presets of the same names.
    """

    name: str
    title: str
    requirements: tuple[tuple[str, ...], ...]
    module: str
    has_operators: bool = False  # a library that its files need
    equivalents: Mapping[str, dict[str, Any]] | None = field(default=None, hash=False)

    def settings(self, preset: str) -> dict[str, Any]:
        """For that preset; ChildError where the peer has nothing like it."""
        if self.equivalents is None:
            return {}
        if preset not in self.equivalents:
            raise ChildError(NO_EQUIVALENT)
        return self.equivalents[preset]

    @property
    def packages(self) -> list[str]:
        """The distributions by name, the one that matters first."""
        return [each.partition("==")[0] for each in (*self.requirements[-1], *sum(self.requirements[:-1], ()))]


_RUNTIME = ("onnxruntime==1.31.1",)
_ROWS = (
    # torch first and alone: a resolver that may choose brings CUDA libraries along
    Peer(
        "amd-quark",
        "AMD Quark",
        (
            ("torch==2.13.0",),
            ("amd-quark==0.13", *_RUNTIME, "onnx==1.22.0"),
            ("transformers==5.22.2", "accelerate==1.15.0"),  # for language models
        ),
        "quark.onnx",
        has_operators=True,
    ),
    Peer(
        "onnxruntime",
        "ONNX Runtime",
        ((*_RUNTIME, "onnx==1.22.0", "onnx-ir==1.1.0", "sympy==1.14.0"),),  # onnx-ir: for MatMulNBitsQuantizer
        "onnxruntime.quantization",
        equivalents=MappingProxyType(_ONNXRUNTIME),
    ),
    Peer(
        "nncf",
        "NNCF",
        (("nncf==3.4.0", *_RUNTIME, "onnx==1.22.0"),),
        "nncf.onnx",
        equivalents=MappingProxyType(_NNCF),
    ),
)
_TRAINERS = (
    Peer(
        "amd-quark-torch",
        "AMD Quark",
        (
            ("torch==2.13.0",),
            ("torchao==0.18.0",),
            ("amd-quark==0.13", *_RUNTIME, "onnx==1.22.0", "transformers==5.22.2"),
        ),
        "quark.torch",
    ),
    Peer("brevitas", "Brevitas", (("torch==2.13.0",), ("brevitas==0.13.4",)), "brevitas"),
)
PEERS: Mapping[str, Peer] = MappingProxyType({row.name: row for row in _ROWS})
TRAINERS: Mapping[str, Peer] = MappingProxyType({row.name: row for row in _TRAINERS})  # of torch modules: bench.qat


def add_peer_arguments(parser: argparse.ArgumentParser, names: Sequence[str] = tuple(PEERS)) -> None:
    """`names` are those that the benchmark can measure."""
    parser.set_defaults(known_peers=tuple(names))
    known = ", ".join(names)
    parser.add_argument(
        "--peers", nargs="+", default=list(names), metavar="NAME[=PYTHON]", help=f"none, or of {known} (all)"
    )
    parser.add_argument(
        "--environments", type=Path, default=ENVIRONMENTS, metavar="DIR", help="of the peers (.venv-peers)"
    )


def asked_for(arguments: argparse.Namespace) -> dict[str, str | None]:
    """Peers by name, with the interpreter where one was given."""
    if arguments.peers == ["none"]:
        return {}
    found: dict[str, str | None] = {}
    for text in arguments.peers:
        name, equals, python = text.partition("=")
        if name not in arguments.known_peers:
            raise SystemExit(
                f"--peers {text}: no peer '{name}' here; known: {', '.join(arguments.known_peers)}, or none"
            )
        program = shutil.which(python) if equals else None
        if equals and program is None:
            raise SystemExit(f"--peers {text}: no such program; give the python of the peer's environment")
        # not resolved: the interpreter of a virtual environment is a link, and knows its environment by that
        found[name] = program and str(Path(program).absolute())
    return found


def open_peers(arguments: argparse.Namespace) -> Interpreters:
    """All that were asked for, ready to run; a peer that is not to be had is listed with the reason."""
    asked = asked_for(arguments)
    del arguments.known_peers
    known = {**PEERS, **TRAINERS}
    pythons, missing, described = {}, {}, {}
    for name, given in asked.items():
        peer = known[name]
        try:
            python = given or str(make_environment(peer, arguments.environments))
            described[name] = describe(peer, python)
            pythons[name] = python
        except (ChildError, OSError) as error:
            missing[name] = str(error)
            say(f"{peer.title} is left out: {error}")
    present = {name: (known[name], python) for name, python in pythons.items()}
    return Interpreters({name: known[name].title for name in asked}, present, missing, described)


def describe(peer: Peer, python: str) -> str:
    """The versions in its environment; ChildError where it cannot be imported."""
    code = (
        f"import importlib, importlib.metadata as m; importlib.import_module({peer.module!r})\n"
        f"print('versions:' + ', '.join(f'{{name}} {{m.version(name)}}' for name in {peer.packages!r}))"
    )
    with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
        log = run_python([python, "-I", "-c", code], folder, IMPORT_SECONDS)
    _, found, facts = log.rpartition("versions:")
    if not found:
        raise ChildError(f"'{Path(python).name}' said nothing of its versions: is it a Python?")
    return facts.strip()


def make_environment(peer: Peer, folder: Path) -> Path:
    """The interpreter of the peer's environment below the folder, made unless it is there."""
    target = folder.absolute() / peer.name
    content = {"python": sys.version.split()[0], "requirements": [list(step) for step in peer.requirements]}
    if _content_of(target) == content:
        return _python_in(target)
    say(f"{peer.title}: making its environment (minutes)")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{peer.name}-", dir=folder) as making:
        fresh = Path(making, peer.name)
        run_python([sys.executable, "-m", "venv", str(fresh)], making)
        for step in peer.requirements:
            run_python([str(_python_in(fresh)), *PIP, *step], making)
        (fresh / STAMP).write_text(json.dumps(content), encoding="utf-8")
        if target.exists():
            os.replace(target, Path(making, "old"))
        os.replace(fresh, target)
    return _python_in(target)


def run_python(command: list[str], folder: str, seconds: float | None = None) -> str:
    """What it printed; ChildError with its last words where it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"took longer than {seconds:.0f} s") from error
    if done.returncode:
        raise ChildError(last_words(done.stdout, done.returncode))
    return done.stdout


def _content_of(environment: Path) -> Any:
    stamp = environment / STAMP
    try:
        return json.loads(stamp.read_text(encoding="utf-8")) if stamp.is_file() else None
    except ValueError:
        return None  # made anew


def _python_in(environment: Path) -> Path:
    return environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
