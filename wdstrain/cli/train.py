"""Verbs of training: train, evaluate, compare, predict, export, and the demo."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from wdstrain.cli.common import Shown, Verb, calling, result
from wdstrain.report.terminal import print_message
from wdstrain.runtime.options import REQUIRED, option
from wdstrain.shards.options import where_option
from wdstrain.training.config import (
    CONFIG,
    OPTIONS,
    Config,
    EvaluateArguments,
    ExportArguments,
    PredictArguments,
    is_made,
    read_config,
    refuse,
)
from wdstrain.training.options import GROUPS

if TYPE_CHECKING:
    from wdstrain.training.train import TrainResult


@dataclass(frozen=True)
class _Run:
    """What `train` takes beside the options of a run."""

    urls: Sequence[str] = option(
        (), "folder, index.json, tar, glob or brace pattern of shards", metavar="URL", several=True
    )
    _: KW_ONLY
    val: Sequence[str] = option(
        (),
        "shards to validate on (default: the split val, if there is one)",
        metavar="URL",
        nargs="+",
    )
    out: str = option(REQUIRED, "folder of the run", metavar="DIR")
    resume: bool = option(
        False,
        "continue from the last checkpoint in the folder, with its options; start if there is none",
    )
    overwrite: bool = option(False, "replace an earlier run in the folder")
    folds: int | None = option(
        None,
        "train a run for each --fold 1/COUNT to COUNT/COUNT, in DIR/fold-1 and so on, and give "
        "mean and deviation of their best epochs; --resume goes on where it stopped",
        metavar="COUNT",
    )
    config: str | None = option(
        None, "options in a .toml or .yaml file; flags override it", metavar="FILE"
    )


@dataclass(frozen=True)
class _TrainOptions(Config, _Run):
    """Words and flags of `train`."""


@dataclass(frozen=True, kw_only=True)
class _EvaluateOptions(EvaluateArguments):
    where: str | None = where_option("only samples")


@dataclass(frozen=True, kw_only=True)
class _PredictOptions(PredictArguments):
    where: str | None = where_option("only samples")


@dataclass(frozen=True)
class _CompareOptions:
    runs: Sequence[str] = option(REQUIRED, "folder of a run", metavar="RUN", several=True)
    _: KW_ONLY
    report: str | None = option(None, "page to write, with curves of all runs", metavar="FILE")


@dataclass(frozen=True, kw_only=True)
class _DemoOptions:
    folder: str = option("shards", "folder to work in", metavar="DIR", flag="--dir")


def _train(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    flags = {name: given.pop(name) for name in OPTIONS if name in given}
    run = _Run(**given)
    folders = _folders(run, flags)
    options, shards = _options(run, flags, next(iter(folders)))
    from wdstrain.training.distributed import DistributedContext, Stopped
    from wdstrain.training.train import train

    shared = {**options, **shards, "resume": run.resume, "overwrite": run.overwrite}
    try:
        for out, fold in folders.items():
            done = train(out=out, **{**shared, **fold})
    except Stopped as stopped:
        print_message(
            f"wdstrain: stopped by {stopped.name}; a checkpoint is written. {arguments.verb.interrupted}"
        )
        return stopped.status
    if DistributedContext().leads:
        result(arguments, *(_trained(done) if run.folds is None else _of_folds(list(folders))))
    return 0


def _folders(run: _Run, flags: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return the folder of each run, with its fold if there are several."""
    if run.folds is None:
        return {run.out: {}}
    refuse(
        run.folds < 2 or flags.get("fold") is not None,
        "{folds}: must be 2 or more, without {fold}.",
        folds=run.folds,
        fold=...,
    )
    return {
        os.path.join(run.out, f"fold-{k}"): {"fold": f"{k}/{run.folds}"}
        for k in range(1, run.folds + 1)
    }


def _options(
    run: _Run, flags: dict[str, Any], folder: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (options, addresses of shards) of the folder to resume, of the file, and of the flags.

    The later ones win. Raises UsageError for wrong options, and if there are no shards.
    """
    saved = os.path.join(folder, CONFIG)
    before, data = read_config(saved) if run.resume and os.path.exists(saved) else ({}, {})
    more, more_data = read_config(run.config) if run.config else ({}, {})
    named, data = {**more, **flags}, {**data, **more_data}
    urls = run.urls or data.get("train")
    for name in ("model", "optimizer"):  # a run's folder may be somebody else's
        refuse(
            name not in named and is_made(str(before.get(name, ""))),
            f"{saved} names {{{name}}}, and functions that a run names are not called.",
            f"Give it: --{name} module:function",
            **{name: before.get(name)},
        )
    refuse(
        not urls,
        f"no shards to train on, and {run.out} holds no run to continue.",
        "Give their address first, as --val takes each word up to the next option, or a "
        "--config file whose table [data] has train.",
    )
    val = run.val or (None if run.urls else data.get("val"))
    Config.of({**before, **named})  # before torch is imported, which takes seconds
    return {**before, **named}, {"urls": urls, "val": val}


def _trained(done: TrainResult) -> Shown:
    from wdstrain.training.report import metric_rows, metric_text

    last, best = done.epochs[-1], (done.best or {}).get(done.monitor)
    rows = [
        ("epochs", str(len(done.epochs))),
        ("samples/s", f"{last['samples_per_second']:.0f}"),
        ("stall", f"{last['stall']:.1%}"),
        ("bad samples", str(last["bad"])),
        ("validation", ", ".join(map(" ".join, metric_rows(done.val))) or "none"),
        ("best", "" if best is None else f"{metric_text(done.monitor, best)} (best.pt)"),
        ("verdict", last["verdict"]),
        ("run is in", done.folder),
        ("report", os.path.join(done.folder, "report.html")),
    ]
    names = ("epochs", "best", "monitor", "stop_reason")
    return {"out": done.folder, **{name: getattr(done, name) for name in names}}, rows, ""


def _of_folds(folders: list[str]) -> Shown:
    from wdstrain.training.report import compare, spread, spread_lines

    rows = compare(folders)
    figures = spread(rows)
    _, columns, below = _compared(rows, 0)
    return {"folds": rows, **figures}, columns, "\n".join([below, *spread_lines(**figures)])


def _compared(rows: list[dict[str, Any]], seconds: float) -> Shown:
    from wdstrain.training.report import table

    texts = table(rows)
    differing = [f"\n{run}: {options}" for run, *_, options in texts[1:] if options]
    return {"runs": rows}, [tuple(row[:-1]) for row in texts], "".join(["\n", *differing])


def _selected(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the index of the chosen samples of one split in place of `where`."""
    if (condition := options.pop("where", None)) is None:
        return options
    from wdstrain.shards.resolve import open_shards

    return {**options, "urls": open_shards(options["urls"]).where(condition)}


def _evaluate(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    from wdstrain.training.distributed import DistributedContext
    from wdstrain.training.evaluate import evaluate
    from wdstrain.training.report import metric_rows

    _, metrics = evaluate(**_selected(given))
    if DistributedContext().leads:
        files = [(name, given[name]) for name in ("report", "predictions") if name in given]
        result(arguments, metrics, [*metric_rows(metrics), *files])
    return 0


def _predict(arguments: argparse.Namespace, given: dict[str, Any]) -> int:
    from wdstrain.training.evaluate import predict

    if len(given["urls"]) == 1:
        given["urls"] = given["urls"][0]  # which may be a folder of images
    done = predict(**_selected(given))
    rows = [("rows", str(done.rows)), ("with errors", str(done.bad)), ("table", given["out"])]
    result(arguments, {"rows": done.rows, "bad": done.bad, "out": given["out"]}, rows)
    return 1 if done.bad else 0


def _exported(written: list[str], seconds: float) -> Shown:
    return {"written": written}, [("written", path) for path in written], ""


def _toured(done: tuple[list[tuple[str, str]], list[str]], seconds: float) -> Shown:
    rows, steps = done
    return dict(rows), rows, "\n  ".join(["\n\nNext, with your own data:", *steps])


_BEST = "runs/photos/checkpoints/best.pt"
VERBS = {
    "train": Verb(
        _TrainOptions,
        "train shards/photos --out runs/photos --epochs 10",
        _train,
        "Run it again with --resume to continue from the last checkpoint.",
        GROUPS,
    ),
    "evaluate": Verb(_EvaluateOptions, f"evaluate {_BEST} 'shards/photos/val-*.tar'", _evaluate),
    "compare": Verb(
        _CompareOptions,
        "compare runs/* --report runs.html",
        calling("training.report:compare", _compared),
    ),
    "predict": Verb(_PredictOptions, f"predict {_BEST} new-photos -o predictions.csv", _predict),
    "export": Verb(
        ExportArguments,
        f"export {_BEST} photos.onnx",
        calling("training.evaluate:export", _exported),
    ),
    "demo": Verb(_DemoOptions, "demo --dir shards", calling("demo:demo", _toured)),
}
