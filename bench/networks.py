"""Real networks by their own task measures: float, ours, and ONNX Runtime's and NNCF's quantizers in the same run.

    python -m bench.networks --zoo DIR --judge FILE.py [FILE.py ...] [--only NAME ...] [--presets NAME ... | none]
                             [--peers NAME ... | none] [--calib-samples 32] [--judge-python PYTHON] [--keep DIR]
                             [--threads 1] [--resume]

A judge script has a table NETWORKS, name to class; a class gives calibration samples and evaluates files
(`calibration()`, `evaluate(path, library)`). It runs in a process of its own, by `--judge-python` where it needs
packages that are not installed here. `--zoo` is the folder with the float models, NAME.onnx, and whatever the script
reads.

All quantizers calibrate on the same samples, evenly spaced over those that the judge has. Presets and peers'
configurations go by kind: a network is a transformer if it has a Softmax and most of its multiply-accumulates are in
matrix products, else convolutional. The first measure that a judge reports is the main one, and larger is better unless
its name says error (cer, wer, error, loss, mse, distance, perplexity). In bold: the best static configuration of the
peers, by the main measure. In brackets: the float network's own value.

Latency is one inference of the first calibration sample; the file, the float model and, for ours, the same preset
without protection take turns. 8-bit MACs are the share of multiply-accumulates of Conv, ConvTranspose, Gemm and MatMul
with both operands in 8-bit integers. `--keep` keeps the peers' files and uses them again where model, samples, settings
and versions are the same; their seconds are then those of the run that made them. `--resume` continues today's record
and skips the rows that it has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from bench.cells import number, times
from bench.child import OURS, ChildError, Interpreters, Outcome, run_script
from bench.macs import MATRIX_PRODUCTS, Macs, count_macs
from bench.models import NamedModel, checked_presets, label, positive
from bench.peers import PEERS, add_peer_arguments, open_peers, static_settings
from bench.record import Blank, Record, add_record_arguments, say
from bench.samples import SampleFolder
from bench.side_by_side import FLOAT
from bench.timing import Timing, take_turns
from quark.errors import QuarkError
from quark.onnx import get_default_config, get_library_path
from quark.onnx.data.samples import held_out_count
from quark.onnx.quantization.config.options import settings_of
from quark.onnx.quantization.presets import PRESETS
from quark.onnx.session import open_session

# arguments that choose rows, or say how to go about it; rows of other choices stand beside each other in one record
CHOOSING = ("presets", "only", "peers", "timeout", "no_unprotected")
NONE = ["none"]
CONVOLUTIONAL, TRANSFORMER = KINDS = ("convolutional", "transformer")
DEFAULT_PRESETS = {
    CONVOLUTIONAL: ["INT8_CNN_DEFAULT", "A8W8", "XINT8", "MXINT8", "A16W8"],
    TRANSFORMER: ["INT8_TRANSFORMER_DEFAULT", "A8W8", "XINT8", "MXINT8", "A16W8"],
}
UNPROTECTED = {"Protect": "none"}
HEADER = [
    "network",
    "quantizer",
    "configuration",
    "measures",
    "verdict",
    "quantize s",
    "file MB",
    "ms",
    "/ float",
    "/ unprotected",
    "8-bit MACs %",
]
ERROR_WORDS = {"cer", "wer", "error", "errors", "loss", "mse", "rmse", "mae", "distance", "perplexity"}


@dataclass(frozen=True)
class Configuration:
    """One way to quantize a network: a preset of ours, with options of its own, or settings for a peer.

    The settings of ours are fields of the configuration that are not extra options.
    """

    quantizer: str
    label: str
    preset: str = ""
    extra_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    is_static: bool = True
    kinds: tuple[str, ...] = KINDS


def static_onnxruntime(title: str, activation: str, method: str, **settings: Any) -> Configuration:
    """Return a configuration of ONNX Runtime's static quantization, with int8 weights."""
    # histograms are collected one sample at a time: samples of different shapes cannot be stacked
    static = static_settings(activation, "QInt8", method) | {"part": 1} | settings
    return Configuration("onnxruntime", title, settings=static)


PRODUCTS_ONLY = {"op_types": ["MatMul", "Gemm", "Conv"]}
PEER_CONFIGURATIONS = (
    static_onnxruntime("U8S8 MinMax", "QUInt8", "MinMax"),
    static_onnxruntime("S8S8 MinMax", "QInt8", "MinMax"),
    static_onnxruntime("U8S8 Percentile", "QUInt8", "Percentile"),
    static_onnxruntime("U8S8 MinMax, products only", "QUInt8", "MinMax", **PRODUCTS_ONLY),
    static_onnxruntime("S8S8 MinMax, products only", "QInt8", "MinMax", **PRODUCTS_ONLY),
    static_onnxruntime("U8S8 Percentile, products only", "QUInt8", "Percentile", **PRODUCTS_ONLY),
    Configuration(
        "onnxruntime",
        "dynamic S8",
        settings={"weight": "QInt8", "method": "dynamic", "per_channel": True},
        is_static=False,
        kinds=(TRANSFORMER,),
    ),
    Configuration("nncf", "mixed", settings={"preset": "mixed"}, kinds=(CONVOLUTIONAL,)),
    Configuration("nncf", "performance", settings={"preset": "performance"}, kinds=(CONVOLUTIONAL,)),
    Configuration(
        "nncf", "mixed, transformer", settings={"preset": "mixed", "model_type": "transformer"}, kinds=(TRANSFORMER,)
    ),
    Configuration(
        "nncf",
        "performance, transformer",
        settings={"preset": "performance", "model_type": "transformer"},
        kinds=(TRANSFORMER,),
    ),
)


@dataclass
class Figure:
    """One row of the table. What could not be measured is None or empty, and `errors` has the reason by step.

    `latencies` are those of FLOAT, of this file ("file"), and for ours of the same preset without protection
    ("unprotected"), all from the same turns.
    """

    network: str
    kind: str
    quantizer: str
    configuration: str
    is_static: bool
    samples: int
    measures: dict[str, float] = field(default_factory=dict)
    verdict: str | None = None
    seconds: float | None = None
    peak_mb: float | None = None
    file_mb: float | None = None
    latencies: dict[str, Timing] = field(default_factory=dict)
    macs: int | None = None
    eight_bit_percent: float | None = None
    errors: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Figure:
        latencies = {name: Timing(**timing) for name, timing in content["latencies"].items()}
        return cls(**{**content, "latencies": latencies})

    @property
    def key(self) -> tuple[str, str, str]:
        return self.network, self.quantizer, self.configuration

    def score(self) -> float | None:
        """Return the main measure, with its sign changed where smaller is better."""
        for name, value in self.measures.items():
            score = -value if ERROR_WORDS & set(name.lower().split("_")) else value
            return score if score == score else None  # NaN is not a score
        return None

    def cells(self, *, is_best: bool) -> list[str]:
        texts = []
        for name, value in self.measures.items():
            if name.startswith("float_") and name.removeprefix("float_") in self.measures:
                continue  # stands in brackets behind the measure
            reference = self.measures.get(f"float_{name}")
            texts.append(f"{name} {value:.5g}" + (f" ({reference:.5g})" if reference is not None else ""))
        if is_best:
            texts[0] = f"**{texts[0]}**"
        timings = {name: timing.best for name, timing in self.latencies.items()}
        own = timings.get("file")
        title = PEERS[self.quantizer].title if self.quantizer in PEERS else self.quantizer
        return [
            self.network,
            title,
            self.configuration,
            ", ".join(texts),
            self.verdict or "",
            number(self.seconds, 1),
            number(self.file_mb),
            number(own and 1e3 * own),
            "" if self.quantizer == FLOAT else times(own, timings.get(FLOAT)),
            times(own, timings.get("unprotected")),
            "" if self.quantizer == FLOAT else number(self.eight_bit_percent, 1),
        ]

    def blanks(self) -> list[Blank]:
        what = f"{self.network} {self.configuration}".strip()
        return [Blank(self.quantizer, what, f"{step}: {reason}") for step, reason in self.errors.items()]


def table(figures: Sequence[Figure]) -> list[list[str]]:
    """Return the rows: network by network, float first, then ours, then the peers; their best static one in bold."""
    networks = list(dict.fromkeys(figure.network for figure in figures))
    quantizers = [FLOAT, OURS, *PEERS]
    rows = []
    for network in networks:
        own = [figure for figure in figures if figure.network == network]
        own.sort(key=lambda figure: quantizers.index(figure.quantizer))
        rivals = [figure for figure in own if figure.quantizer in PEERS and figure.is_static]
        scores = [score for figure in rivals if (score := figure.score()) is not None]
        best = max(scores, default=None)
        for figure in own:
            is_best = best is not None and figure in rivals and figure.score() == best
            rows.append(figure.cells(is_best=is_best))
    return rows


def update(record: Record, figures: Sequence[Figure]) -> None:
    """Make the record show these figures, and write it."""
    record.rows, record.blanks, record.figures = [], [], [asdict(figure) for figure in figures]
    record.rows = table(figures)
    record.blanks = [blank for figure in figures for blank in figure.blanks()]
    record.write()


@dataclass(frozen=True)
class Judge:
    """Judge scripts, run by an interpreter that has what they need; `networks` says which script has which network."""

    python: str
    zoo: Path
    networks: Mapping[str, Path]
    timeout_seconds: float

    @classmethod
    def open(cls, arguments: argparse.Namespace) -> Judge:
        """Find the networks that were asked for; what is wrong with the arguments ends the program."""
        python = shutil.which(arguments.judge_python)
        if python is None:
            raise SystemExit(f"--judge-python {arguments.judge_python}: no such program; give a Python interpreter")
        if not arguments.zoo.is_dir():
            raise SystemExit(f"--zoo {arguments.zoo}: no such folder; give the one that the networks were built in")
        known: dict[str, Path] = {}
        built: list[str] = []
        for script in arguments.judge:
            if not script.is_file():
                raise SystemExit(f"--judge {script}: no such file; give the script with the table NETWORKS")
            job = {"task": "list", "judge": str(script.absolute()), "zoo": str(arguments.zoo.absolute())}
            try:
                found = run_script(python, "judge.py", job, arguments.timeout)
            except ChildError as error:
                raise SystemExit(
                    f"--judge {script}: {error}; it runs by --judge-python, which must have the packages it imports"
                ) from error
            for name in found["known"]:
                if name in known:
                    raise SystemExit(f"--judge {script}: network '{name}' is in '{known[name]}' too; give one of them")
                known[name] = script.absolute()
            built += found["built"]
        for name in arguments.only or []:
            if name not in known:
                raise SystemExit(f"--only {name}: no such network; the judges have {', '.join(known)}")
            if name not in built:
                raise SystemExit(f"--only {name}: there is no '{arguments.zoo / name}.onnx'; build it first")
        chosen = arguments.only or built
        if not chosen:
            raise SystemExit(f"--zoo {arguments.zoo}: none of {', '.join(known)} was built there, as NAME.onnx")
        networks = {name: known[name] for name in chosen}
        return cls(python, arguments.zoo.absolute(), networks, arguments.timeout)

    def model(self, name: str) -> NamedModel:
        return NamedModel(name, self.zoo / f"{name}.onnx")

    def write_calibration(self, name: str, count: int, folder: Path) -> SampleFolder:
        """Write at most `count` samples to calibrate on, and some more that ours can hold out."""
        folder.mkdir()
        job = {"name": name, "folder": str(folder), "count": count, "spare": held_out_count(count)}
        found = self._run(name, "calibration", job, self.timeout_seconds)
        return SampleFolder(folder, found["count"])

    def evaluate(self, name: str, files: Mapping[tuple[str, str, str], tuple[Path, bool]]) -> dict[Any, dict[str, Any]]:
        """Return {"measures": ...} or {"error": ...} for each file, given with whether it needs our operators.

        All files share one process, since the float network's results are computed once in each. A file that crashes
        the process gets the error, and the rest are evaluated in a new one.
        """
        results: dict[Any, dict[str, Any]] = {}
        pending = list(files)
        while pending:
            with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
                partial_results = Path(folder, "partial.json")
                paths = [(str(files[key][0]), get_library_path() if files[key][1] else None) for key in pending]
                job = {"name": name, "files": paths, "partial": str(partial_results)}
                try:
                    found = self._run(name, "evaluate", job, self.timeout_seconds * len(pending))["results"]
                except ChildError as error:
                    found = json.loads(partial_results.read_text()) if partial_results.is_file() else []
                    found.append({"error": str(error)})
            results |= dict(zip(pending, found, strict=False))
            pending = pending[len(found) :]
        return results

    def _run(self, name: str, task: str, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        places = {"judge": str(self.networks[name]), "zoo": str(self.zoo)}
        return run_script(self.python, "judge.py", {"task": task, **places, **job}, seconds)


def kind_of(path: Path, macs: Macs) -> str:
    """Return which of KINDS a float model is, given its multiply-accumulates."""
    nodes = onnx.load(path, load_external_data=False).graph.node
    in_matrices = sum(count for operator, count in macs.by_operator.items() if operator in MATRIX_PRODUCTS)
    has_softmax = any(node.op_type == "Softmax" for node in nodes)
    return TRANSFORMER if has_softmax and 2 * in_matrices > macs.total else CONVOLUTIONAL


def has_protection(preset: str) -> bool:
    """True if the preset is one of ours by name and takes the option that turns protection off."""
    if preset not in PRESETS:
        return False
    config = get_default_config(preset)
    config.extra_options.update(UNPROTECTED)
    try:
        settings_of(config)
    except QuarkError:
        return False
    return True


def configurations(kind: str, arguments: argparse.Namespace, peers: Collection[str]) -> list[Configuration]:
    """Return everything to measure on a network of that kind, the float model apart.

    A preset that can be made without protection is followed by itself without it.
    """
    chosen = []
    presets = DEFAULT_PRESETS[kind] if arguments.presets is None else arguments.presets
    for preset in [] if presets == NONE else presets:
        chosen.append(Configuration(OURS, label(preset), preset))
        if not arguments.no_unprotected and has_protection(preset):
            chosen.append(Configuration(OURS, f"{label(preset)}, Protect: none", preset, UNPROTECTED))
    return chosen + [
        configuration
        for configuration in PEER_CONFIGURATIONS
        if configuration.quantizer in peers and kind in configuration.kinds
    ]


@dataclass
class Bench:
    """One network with its samples; `folder` takes the files, but for those of peers where `--keep` is given.

    `choose` gives everything to measure on a network of that kind, the float model apart.
    """

    judge: Judge
    model: NamedModel
    interpreters: Interpreters
    arguments: argparse.Namespace
    folder: Path
    choose: Callable[[str], list[Configuration]]

    def figures(self, done: Collection[tuple[str, str, str]]) -> list[Figure]:
        """Measure everything that is not done yet."""
        name = self.model.name
        try:
            samples = self.judge.write_calibration(name, self.arguments.calib_samples, self.folder / "calibration")
        except ChildError as error:
            raise SystemExit(f"network {name}: the judge gives no calibration samples: {error}") from error
        feeds = samples.first()
        try:
            float_macs = count_macs(self.model.path, feeds)
        except QuarkError as error:
            raise SystemExit(
                f"network {name}: the float model does not run on its calibration data: {error}"
            ) from error
        kind = kind_of(self.model.path, float_macs)
        pending = [
            each
            for each in [Configuration(FLOAT, ""), *self.choose(kind)]
            if (name, each.quantizer, each.label) not in done
        ]
        say(f"{name}: {kind}, {samples.count} samples, {len(pending)} rows to measure")

        figures: list[Figure] = []
        files: dict[tuple[str, str, str], Path] = {}
        for each in pending:
            figure = Figure(name, kind, each.quantizer, each.label, each.is_static, samples.count)
            figures.append(figure)
            if each.quantizer == FLOAT:
                files[figure.key] = self.model.path
                figure.file_mb = self.model.path.stat().st_size / 1e6
                continue
            try:
                files[figure.key], outcome = self._quantize(each, samples)
            except ChildError as error:
                figure.errors["quantize"] = str(error)
                say(f"{name} {each.quantizer} {each.label}: {error}")
                continue
            figure.seconds, figure.peak_mb, figure.file_mb = outcome.seconds, outcome.peak_mb, outcome.file_mb
            report = files[figure.key].with_suffix(".json")
            if each.quantizer == OURS and report.is_file():
                figure.verdict = json.loads(report.read_text(encoding="utf-8")).get("verdict")
            say(f"{name} {each.quantizer} {each.label}: quantized in {outcome.seconds:.1f} s")

        judged = self.judge.evaluate(name, {key: (path, _has_operators(key[1])) for key, path in files.items()})
        for figure in figures:
            if figure.key in files:
                result = judged[figure.key]
                if "error" in result:
                    figure.errors["evaluate"] = result["error"]
                figure.measures = result.get("measures", {})
                self._run(figure, files, feeds)
                say(f"{name} {figure.quantizer} {figure.configuration}: {figure.measures or figure.errors}")
        return figures

    def _quantize(self, configuration: Configuration, samples: SampleFolder) -> tuple[Path, Outcome]:
        """Make the file, or find the one that was kept; ChildError if the quantizer fails."""
        slug = re.sub(r"\W+", "_", f"{configuration.quantizer} {configuration.label}")
        is_kept = configuration.quantizer != OURS and self.arguments.keep is not None
        target = self.folder / slug
        if is_kept:
            made_of = [
                hashlib.sha256(self.model.path.read_bytes()).hexdigest(),
                samples.digest(),
                dict(configuration.settings),
                self.interpreters.facts.get(configuration.quantizer),
            ]
            key = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:12]
            target = self.arguments.keep.absolute() / self.model.name / f"{slug}-{key}"
            if (target / "made.json").is_file():
                return target / "quantized.onnx", Outcome(**json.loads((target / "made.json").read_text()))
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as making:
            output = Path(making, slug, "quantized.onnx")
            output.parent.mkdir()
            outcome = self.interpreters.quantize(
                configuration.quantizer,
                self.model,
                samples,
                configuration.preset,
                output,
                settings=dict(configuration.settings),
                extra_options=dict(configuration.extra_options),
            )
            (output.parent / "made.json").write_text(json.dumps(asdict(outcome)), encoding="utf-8")
            os.replace(output.parent, target)
        return target / "quantized.onnx", outcome

    def _run(self, figure: Figure, files: Mapping[tuple[str, str, str], Path], feeds: Mapping[str, Any]) -> None:
        """Measure latency and count multiply-accumulates."""
        path = files[figure.key]
        unprotected = files.get((figure.network, OURS, f"{figure.configuration}, Protect: none"))
        beside = {FLOAT: self.model.path, "file": path}
        if figure.quantizer == FLOAT:
            del beside[FLOAT]
        if figure.quantizer == OURS and unprotected is not None:
            beside["unprotected"] = unprotected
        try:
            runs: dict[str, Callable[[], object]] = {
                name: partial(open_session(file, threads=self.arguments.threads).run, None, feeds)
                for name, file in beside.items()
            }
            figure.latencies = take_turns(runs, self.arguments.turns)
            macs = count_macs(path, feeds)
            figure.macs, figure.eight_bit_percent = macs.total, macs.eight_bit_percent
        except Exception as error:  # the runtime's classes share no root; the other rows are worth having
            figure.errors["run"] = f"{type(error).__name__}: {' '.join(str(error).split())}"


def _has_operators(quantizer: str) -> bool:
    """True if a file of that quantizer may need our library, which has AMD Quark's operators too."""
    return quantizer == OURS or (quantizer in PEERS and PEERS[quantizer].has_operators)


def add_network_arguments(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Where networks and their judges are, and how they are measured."""
    parser.add_argument("--zoo", type=Path, required=is_required, metavar="DIR", help="where the networks were built")
    parser.add_argument(
        "--judge", type=Path, nargs="+", required=is_required, metavar="FILE.py", help="scripts with a table NETWORKS"
    )
    parser.add_argument(
        "--judge-python", type=Path, default=Path(sys.executable), metavar="PYTHON", help="to run them by (this one)"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these networks alone (all that were built)")
    parser.add_argument(
        "--calib-samples", type=positive, default=32, metavar="N", help="to calibrate on, at most (%(default)s)"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="for the peers' files, to be used again")
    parser.add_argument("--threads", type=positive, default=1, metavar="N", help="when timing (%(default)s)")
    parser.add_argument("--turns", type=positive, default=5, help="at least; for a second anyway (%(default)s)")
    parser.add_argument(
        "--timeout", type=positive, default=1800, metavar="S", help="of a quantization or an evaluation (%(default)s)"
    )
    parser.add_argument("--resume", action="store_true", help="continue today's record")
    add_record_arguments(parser)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_network_arguments(parser)
    parser.add_argument("--presets", nargs="+", metavar="NAME", help="of ours, or none (by kind of network)")
    parser.add_argument("--no-unprotected", action="store_true", help="measure no preset without its protection")
    add_peer_arguments(parser, ("onnxruntime", "nncf"))
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.presets is not None and arguments.presets != NONE:
        arguments.presets = checked_presets(arguments.presets)
    judge = Judge.open(arguments)
    interpreters = open_peers(arguments).with_timeout(arguments.timeout)
    notes = [f"At most {arguments.calib_samples} samples to calibrate on; latency on {arguments.threads} thread(s)."]
    record = Record.begin("networks", arguments, HEADER, notes, interpreters.facts)
    figures: list[Figure] = []
    if arguments.resume and (before := record.earlier(CHOOSING)) is not None:
        figures = [Figure.from_json(figure) for figure in before.figures]
        record.peers = {**before.peers, **record.peers}
    done = {figure.key for figure in figures}
    choose = partial(configurations, arguments=arguments, peers=interpreters.titles)
    for name in judge.networks:
        with tempfile.TemporaryDirectory(prefix="quark-bench-") as folder:
            bench = Bench(judge, judge.model(name), interpreters, arguments, Path(folder), choose)
            figures += bench.figures(done)
        update(record, figures)
    record.finish()


if __name__ == "__main__":
    main()
