"""`quark search`: find a configuration that is small, accurate and fast enough."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quark.cli.options import COUNT, DATA_PATHS, PATH, json_option, metric_option, preprocess_option
from quark.cli.terminal import say, say_json
from quark.report.console import Console, Table, cell, plain_table
from quark.report.quantities import size_text
from quark.search import Budget, Keep, Target, Wanted
from quark.search import search as run_search
from quark.search.trial import is_within

if TYPE_CHECKING:
    from quark.search import SearchResult, Trial

NOTHING_FITS = 3  # exit status


def _names(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


@click.command()
@click.argument("model", type=PATH)
@click.option(
    "--calib",
    required=True,
    type=PATH,
    metavar=DATA_PATHS,
    help="Calibration data: a folder of images, or arrays [n, ...] named after the model's inputs.",
)
@click.option(
    "--data",
    type=PATH,
    metavar=DATA_PATHS,
    help="Data to judge the configurations on, preferably labelled, as for 'quark evaluate'. Without it, samples held "
    "out from calibration are used: at most 16, which is a coarse measure.",
)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    metavar="KIND=VALUE",
    help="size=25% (of the float file) or size=10MB; drop=1.0 (points of accuracy, or percent of --metric); "
    "latency=80% or latency=5ms (per sample); time=10m (for the search). Repeatable.",
)
@click.option(
    "--target",
    type=click.Choice(["cpu", "npu", "gpu", "size"]),
    default="cpu",
    show_default=True,
    help="Where the model will run. Configurations that gain nothing there are ranked last: on a cpu those slower than "
    "float, for npu and gpu those in formats that these do not compute, for size those whose verdict is not ok.",
)
@click.option("--out", type=PATH, metavar="DIR", help="Folder for the results (default: MODEL_search).")
@click.option("--presets", callback=_names, metavar="A,B", help="Try only these presets.")
@click.option("--formats", callback=_names, metavar="A,B", help="Try only these weight formats, such as int8,mxint8.")
@click.option("--limit", type=COUNT, metavar="N", help="Use N evenly spaced samples of --data.")
@click.option("--labels", type=PATH, metavar="FILE", help="Classes of --data: lines 'NAME NUMBER'.")
@click.option("--num-calib", type=COUNT, metavar="N", help="Use N samples of --calib (default: all).")
@preprocess_option
@metric_option(
    "Configurations are ranked by it. Built-in measures compare the outputs on --data, or on the held-out samples; "
    "functions load their own data."
)
@click.option(
    "--keep",
    type=click.Choice(["best", "all", "none"]),
    default="best",
    show_default=True,
    help="Which model files to keep. best: those that no other beats in size, drop and latency.",
)
@json_option("Print JSON instead of the table.")
def search(
    model: Path,
    calib: Path,
    data: Path | None,
    budgets: tuple[str, ...],
    target: str,
    out: Path | None,
    presets: tuple[str, ...],
    formats: tuple[str, ...],
    limit: int | None,
    labels: Path | None,
    num_calib: int | None,
    preprocess: str,
    metric: str | None,
    keep: str,
    as_json: bool,
) -> None:
    """Try configurations, cheapest first, and rank them.

    Every result is saved at once; after an interruption, the same command resumes. The results folder also has a plot,
    search.html.

    \b
    Exit status: 0 at least one configuration is within the budgets
                 1 an error
                 2 invalid command line
                 3 none is within the budgets; the nearest is named
    """

    if data is None and (limit is not None or labels is not None):
        raise click.UsageError("--limit and --labels are about --data: give that, or leave them out")
    wanted = Wanted(Budget.parse(budgets), presets, formats, limit, labels, Keep(keep), Target(target))
    result = run_search(
        model,
        calib,
        wanted,
        data=data,
        folder=out,
        num_samples=num_calib,
        preprocessing=preprocess,
        metric=metric,
        on_trial=_tell,
    )
    if as_json:
        say_json(result.to_dict(), indent=1)
    else:
        _show(result)
    if result.best is None:
        raise SystemExit(NOTHING_FITS)


def _tell(trial: Trial) -> None:
    """Print a line for each trial, on a terminal."""
    if sys.stderr.isatty():
        figures = trial.measured
        what = trial.failure if figures is None else f"{size_text(figures.size_bytes)}, drop {figures.drop:.2f}"
        say(f"{trial.name}: {what} ({trial.seconds:.1f} s)", err=True)


def _show(result: SearchResult) -> None:
    # wide enough for the table if the output is not a terminal
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120)
    source = result.source
    for note in result.notes:
        console.say(f"note: {note}")
    if result.reused:
        console.say(f"{result.reused} trials of an earlier search were reused")
    top1 = "" if source.top1 is None else f", top-1 {100 * source.top1:.2f} %"
    measure = "" if source.value is None else f", {source.metric} {source.value:.4g}"
    console.say(
        f"float {source.name}: {size_text(source.size_bytes)}, {source.latency_ms:.2f} ms/sample{top1}{measure}; "
        f"judged on {source.judged_on}",
    )
    console.print(_table(result))
    for trial in result.trials:
        if trial.failure:
            console.say(f"failed: {trial.name}: {trial.failure}")
    if result.skipped:
        console.say(f"{len(result.skipped)} not tried; search.json has the reasons")
        reason, count = Counter(reason for _, reason in result.skipped).most_common(1)[0]
        if count > 1:
            console.say(f"  {count} of them: {reason}")
    console.say(f"front: {', '.join(trial.name for trial in result.front) or 'none'}")
    console.say(f"plot:  {result.folder / 'search.html'}")
    console.say(f"best:  {result.recommendation()}")


def _table(result: SearchResult) -> Table:
    has_metric = result.source.metric is not None
    drop = ("measure", "drop %") if has_metric else ("drop",)
    table = plain_table(("configuration",), ("size", "of float", *drop, "KL", "ms/sample", "s"), is_rigid=True)
    table.add_column("", no_wrap=True)
    front = {trial.name for trial in result.front}
    for trial in result.trials:
        figures = trial.measured
        if figures is None:
            continue
        error = "" if figures.error is None else f" +- {figures.error:.2f}"
        marks = [*(["within"] if is_within(trial, result.limits) else []), *(["front"] if trial.name in front else [])]
        table.add_row(
            cell(trial.name),
            size_text(figures.size_bytes),
            f"{100 * figures.size_bytes / result.source.size_bytes:.1f} %",
            *([] if not has_metric else ["-" if figures.value is None else f"{figures.value:.4g}"]),
            f"{figures.drop:.2f}{error}",
            "-" if figures.kl is None else f"{figures.kl:.4f}",
            f"{figures.latency_ms:.2f}",
            f"{trial.seconds:.1f}",
            " ".join(marks),
        )
    return table
