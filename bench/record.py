"""What every benchmark leaves: a record, written as JSON with all figures and as Markdown with the same table.

    record = Record.begin("quantize", arguments, HEADER)
    record.add([cells], figure)         # writes both files: a run that breaks off leaves what it had
    record.finish()                     # prints the table

The files are `NAME-DATE.json` and `NAME-DATE.md` in `--output`; `--label TEXT` makes it `NAME-TEXT-DATE`. Where things
lie on one machine is nobody's business: a record names no folder, only what a path ends with.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bench.cells import markdown
from bench.machine import describe_machine, versions
from quark.onnx.save import write_text

FOLDER = Path(__file__).resolve().with_name("results")
# options that say where something goes or how a run proceeds, not what is measured; with a value, and without
UNSEEN_WITH_VALUE, UNSEEN = ("--output", "--environments", "--keep"), ("--resume",)
_PATH = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[\\/][\w.+@~-]+)+[\\/]([\w.+@~-]+)")


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the record goes, and what it is called."""
    parser.add_argument("--output", type=Path, default=FOLDER, metavar="DIR", help="for the record (bench/results)")
    parser.add_argument("--label", default="", metavar="TEXT", help="part of its name, where something special is run")


def without_places(value: Any) -> Any:
    """The value with every absolute path in its texts cut down to what it ends with.

    >>> without_places({"error": "no file '/data/x/model.onnx'", "rate": "3 GB/s"})
    {'error': "no file 'model.onnx'", 'rate': '3 GB/s'}
    """
    if isinstance(value, str):
        return _PATH.sub(r"\1", value)
    if isinstance(value, Mapping):
        return {str(key): without_places(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_places(each) for each in value]
    return value


def command_line(bench: str, given: Sequence[str]) -> str:
    """The command as it was given, with a word for every place.

    >>> command_line("quantize", ["--models", "/data/nets", "--images", "8", "--peers", "nncf=/envs/bin/python"])
    'python -m bench.quantize --models PATH --images 8 --peers nncf=PATH'
    """
    words: list[str] = []
    rest = iter(given)
    for each in rest:
        if each in UNSEEN_WITH_VALUE:
            next(rest, None)
        elif each not in UNSEEN and not each.startswith(tuple(f"{option}=" for option in UNSEEN_WITH_VALUE)):
            words.append(_without_place(each))
    return " ".join(["python -m", f"bench.{bench}", *words])


def _without_place(word: str) -> str:
    name, equals, value = word.rpartition("=")
    is_place = "/" in value or "\\" in value or os.path.exists(value)  # no error for a text too long for a name
    return f"{name}{equals}PATH" if value and is_place else word


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments that say what is measured: no paths, and of NAME=PATH the name."""
    hidden = {option.lstrip("-") for option in (*UNSEEN_WITH_VALUE, *UNSEEN)} | {"label"}
    found = {}
    for name, value in vars(arguments).items():
        if name in hidden or isinstance(value[0] if isinstance(value, list) and value else value, Path):
            continue
        if name in ("model", "peers") and value is not None:
            value = [text.partition("=")[0] for text in ([value] if isinstance(value, str) else value)]
        found[name] = without_places(value)
    return found


@dataclass(frozen=True)
class Blank:
    """A cell without a figure: whose, of which row, and why."""

    who: str
    what: str
    reason: str


@dataclass
class Record:
    """One run of one benchmark; `rows` are what people read, `figures` everything behind them."""

    bench: str
    date: str
    label: str
    command: str
    machine: str
    versions: dict[str, str]
    peers: dict[str, str]
    arguments: dict[str, Any]
    header: list[str]
    notes: list[str]
    rows: list[list[str]] = field(default_factory=list)
    blanks: list[Blank] = field(default_factory=list)
    figures: list[Any] = field(default_factory=list)
    folder: Path = field(default=FOLDER, metadata={"is_place": True})

    @classmethod
    def begin(
        cls,
        bench: str,
        arguments: argparse.Namespace,
        header: Sequence[str],
        notes: Iterable[str] = (),
        peers: Mapping[str, str] | None = None,
    ) -> Record:
        """An empty record of today; its folder is made now, not after hours of work."""
        if not re.fullmatch(r"[\w.+-]*", arguments.label):
            raise SystemExit(f"--label {arguments.label}: expected letters, digits, and . _ + - alone")
        try:
            arguments.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(f"--output {arguments.output}: {error.strerror}; give a folder to write to") from error
        return cls(
            bench=bench,
            date=datetime.now(timezone.utc).date().isoformat(),
            label=arguments.label,
            command=command_line(bench, sys.argv[1:]),
            machine=describe_machine(),
            versions=versions(),
            peers=without_places(dict(peers or {})),
            arguments=settings_of(arguments),
            header=list(header),
            notes=list(notes),
            folder=arguments.output,
        )

    @classmethod
    def read(cls, path: Path) -> Record:
        """ValueError where the file is no record."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            content["blanks"] = [Blank(**each) for each in content["blanks"]]
            return cls(**content, folder=path.parent)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"'{path}' is no record of a benchmark: {error}; remove it or run the bench anew"
            ) from error

    def earlier(self, choosing: Collection[str]) -> Record | None:
        """Return today's record of the same name, for `--resume`, or None if there is none. This one takes over its
        command lines.

        Arguments in `choosing` only choose rows and may differ; with others or with other columns the rows would not
        belong together, and the program ends.
        """
        if not self.path.is_file():
            return None
        try:
            before = Record.read(self.path)
        except ValueError as error:
            raise SystemExit(f"--resume: {error}") from error
        old, new = (
            {name: value for name, value in each.arguments.items() if name not in choosing and value is not None}
            for each in (before, self)
        )
        for what, was, now in (("arguments", old, new), ("columns", before.header, self.header)):
            if was != now:
                raise SystemExit(
                    f"--resume: '{self.path.name}' was measured with other {what} ({was}; now {now}): "
                    f"give this run a name of its own with --label TEXT"
                )
        # one line for each command that the rows came from
        self.command = "\n".join(dict.fromkeys([*before.command.splitlines(), self.command]))
        return before

    @property
    def name(self) -> str:
        """What its files are called."""
        return "-".join(part for part in (self.bench, self.label, self.date) if part)

    @property
    def path(self) -> Path:
        return self.folder / f"{self.name}.json"

    def add(self, rows: Iterable[Sequence[str]], figure: Any, blanks: Iterable[Blank] = ()) -> None:
        """Rows of the table and the figures that they come from; everything so far is written."""
        self.rows += [list(row) for row in rows]
        self.blanks += [Blank(*without_places([blank.who, blank.what, blank.reason])) for blank in blanks]
        self.figures.append(asdict(figure) if is_dataclass(figure) and not isinstance(figure, type) else figure)
        self.write()

    def write(self) -> None:
        places = {field.name for field in fields(self) if field.metadata.get("is_place")}
        content = without_places({name: value for name, value in asdict(self).items() if name not in places})
        write_text(json.dumps(content, indent=1, ensure_ascii=False, default=float) + "\n", self.path)
        write_text(f"# bench.{self.bench}\n\n{self.markdown()}\n", self.path.with_suffix(".md"))

    def finish(self) -> None:
        self.write()
        print(f"\n{self.markdown()}")

    def markdown(self) -> str:
        """Everything but the figures: command, machine, table, notes, and why cells are blank."""
        commands = "\n".join(f"    {line}" for line in self.command.splitlines())
        found = [commands, f"{self.date}, {self.machine}; {_listed(self.versions)}."]
        if self.peers:
            found.append("\n".join(f"- {who}: {what}" for who, what in self.peers.items()))
        found.append(markdown(self.header, self.rows))
        if self.notes:
            found.append(" ".join(self.notes))
        if self.blanks:
            found.append("Blank:\n\n" + "\n".join(blank_lines(self.blanks)))
        return "\n\n".join(found)


def blank_lines(blanks: Iterable[Blank]) -> list[str]:
    """One line for each reason of each who, with all rows that it is about."""
    rows: dict[tuple[str, str], list[str]] = {}
    for blank in blanks:
        rows.setdefault((blank.who, blank.reason), []).append(blank.what)
    return [f"- {who}: {reason} ({', '.join(dict.fromkeys(what))})" for (who, reason), what in rows.items()]


def _listed(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
