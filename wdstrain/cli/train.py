"""Verbs of training: train, evaluate, predict, export, and the demo."""

from __future__ import annotations

import argparse
import os
from typing import Any

from wdstrain.cli.common import (
    add_options,
    given,
    print_json,
    result,
    selected,
    verb,
    where,
)
from wdstrain.report.terminal import Reporter, print_message, print_result, table_text
from wdstrain.training.config import (
    CONFIG,
    Config,
    EvaluateArguments,
    ExportArguments,
    PredictArguments,
    is_made,
    read_config,
    refuse,
)
from wdstrain.training.options import GROUPS


def add_train(verbs: Any, text: str) -> None:
    """Add `train` to the verbs of the command line."""
    train = verb(
        verbs,
        "train",
        _train,
        text,
        "train shards/photos --out runs/photos --epochs 10",
    )
    train.add_argument(
        "urls",
        nargs="*",
        metavar="URL",
        help="folder, index.json, tar, glob or brace pattern of shards",
    )
    train.add_argument(
        "--val",
        nargs="+",
        metavar="URL",
        help="shards to validate on (default: the split val, if there is one)",
    )
    train.add_argument("--out", required=True, metavar="DIR", help="folder of the run")
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue from the last checkpoint in the folder, with its options; start if there is "
        "none",
    )
    train.add_argument(
        "--overwrite", action="store_true", help="replace an earlier run in the folder"
    )
    train.add_argument(
        "--folds",
        type=int,
        metavar="COUNT",
        help="train a run for each --fold 1/COUNT to COUNT/COUNT, in DIR/fold-1 and so on, and give "
        "mean and deviation of their best epochs; --resume goes on where it stopped",
    )
    train.add_argument(
        "--config", metavar="FILE", help="options in a .toml or .yaml file; flags override it"
    )
    add_options(train, Config, groups=GROUPS)
    train.set_defaults(
        interrupted="Run it again with --resume to continue from the last checkpoint.",
    )


def add_evaluate(verbs: Any, text: str) -> None:
    """Add `evaluate` to the verbs of the command line."""
    example = "evaluate runs/photos/checkpoints/best.pt 'shards/photos/val-*.tar'"
    parser = verb(verbs, "evaluate", _evaluate, text, example)
    add_options(parser, EvaluateArguments)
    where(parser)


def add_compare(verbs: Any, text: str) -> None:
    """Add `compare` to the verbs of the command line."""
    parser = verb(verbs, "compare", _compare, text, "compare runs/* --report runs.html")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--report", metavar="FILE", help="page to write, with curves of all runs")


def add_predict(verbs: Any, text: str) -> None:
    """Add `predict` to the verbs of the command line."""
    example = "predict runs/photos/checkpoints/best.pt new-photos -o predictions.csv"
    parser = verb(verbs, "predict", _predict, text, example)
    add_options(parser, PredictArguments)
    where(parser)


def add_export(verbs: Any, text: str) -> None:
    """Add `export` to the verbs of the command line."""
    example = "export runs/photos/checkpoints/best.pt photos.onnx"
    add_options(verb(verbs, "export", _export, text, example), ExportArguments)


def _train(arguments: argparse.Namespace) -> int:
    parts: dict[str, dict[str, str]] = {arguments.out: {}}
    if (count := arguments.folds) is not None:
        refuse(
            (
                count < 2 or given(arguments, Config).get("fold") is not None,
                "{folds}: must be 2 or more, without {fold}.",
                "",
                {"folds": count, "fold": ...},
            )
        )
        folds = range(1, count + 1)
        parts = {os.path.join(arguments.out, f"fold-{k}"): {"fold": f"{k}/{count}"} for k in folds}
    saved = os.path.join(next(iter(parts)), CONFIG)
    is_there = os.path.exists(saved)
    before, data = read_config(saved) if arguments.resume and is_there else ({}, {})
    more, more_data = read_config(arguments.config) if arguments.config else ({}, {})
    named = {**more, **given(arguments, Config)}
    refuse(
        *(  # a run's folder may be somebody else's
            (
                name not in named and is_made(str(before.get(name, ""))),
                f"{saved} names {{{name}}}, and functions that a run names are not called.",
                f"Give it: --{name} module:function",
                {name: before.get(name)},
            )
            for name in ("model", "optimizer")
        )
    )
    options, data = {**before, **named}, {**data, **more_data}
    addresses: Any = arguments.urls or data.get("train")
    refuse(
        (
            not addresses,
            f"no shards to train on, and {arguments.out} holds no run to continue.",
            "Give their address first, as --val takes each word up to the next option, or a "
            "--config file whose table [data] has train.",
        )
    )
    val = arguments.val or (None if arguments.urls else data.get("val"))
    Config.of(options)  # before torch is imported, which takes seconds
    from wdstrain.training.distributed import DistributedContext, Stopped
    from wdstrain.training.report import metric_rows, metric_text
    from wdstrain.training.train import train

    try:
        for out, fold in parts.items():
            done = train(
                addresses,
                out,
                val=val,
                resume=arguments.resume,
                overwrite=arguments.overwrite,
                **{**options, **fold},
            )
    except Stopped as stopped:
        print_message(
            f"wdstrain: stopped by {stopped.name}; a checkpoint is written. {arguments.interrupted}"
        )
        return stopped.status
    if not DistributedContext().leads:
        return 0
    if count is not None:
        return _print_runs(arguments, list(parts), "folds")
    last = done.epochs[-1]
    best = (done.best or {}).get(done.monitor)
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
    report = {
        "out": done.folder,
        "epochs": done.epochs,
        "best": done.best,
        "monitor": done.monitor,
        "stop_reason": done.stop_reason,
    }
    result(arguments, report, rows)
    return 0


def _evaluate(arguments: argparse.Namespace) -> int:
    from wdstrain.training.distributed import DistributedContext
    from wdstrain.training.evaluate import evaluate
    from wdstrain.training.report import metric_rows

    options = {**given(arguments, EvaluateArguments), "urls": selected(arguments)}
    _, metrics = evaluate(**options)
    if DistributedContext().leads:
        files = [(name, options[name]) for name in ("report", "predictions") if name in options]
        result(arguments, metrics, [*metric_rows(metrics), *files])
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    return _print_runs(arguments, arguments.runs, "runs", arguments.report)


def _print_runs(
    arguments: argparse.Namespace, runs: list[str], title: str, report: str | None = None
) -> int:
    """Print results of runs. title: in JSON; with "folds" their means and deviations, too."""
    from wdstrain.training.report import compare, spread, spread_lines, table

    rows = compare(runs, report)
    figures = spread(rows) if title == "folds" else {}
    if arguments.json:
        print_json({title: rows, **figures})
    else:
        texts = table(rows)
        differing = [f"{run}: {options}" for run, *_, options in texts[1:] if options]
        lines = spread_lines(**figures) if figures else []
        columns = table_text([row[:-1] for row in texts])
        print_result("\n".join([columns, "", *differing, *lines]))
    return 0


def _predict(arguments: argparse.Namespace) -> int:
    from wdstrain.training.evaluate import predict

    chosen = selected(arguments)
    addresses = chosen[0] if isinstance(chosen, list) and len(chosen) == 1 else chosen
    done = predict(**{**given(arguments, PredictArguments), "urls": addresses})
    rows = [("rows", str(done.rows)), ("with errors", str(done.bad)), ("table", arguments.out)]
    result(arguments, {"rows": done.rows, "bad": done.bad, "out": arguments.out}, rows)
    return 1 if done.bad else 0


def _export(arguments: argparse.Namespace) -> int:
    from wdstrain.training.weights import export

    written = export(**given(arguments, ExportArguments))
    result(arguments, {"written": written}, [("written", path) for path in written])
    return 0


# --- demo ----------------------------------------------------------------------------------------


def add_demo(verbs: Any, text: str) -> None:
    """Add `demo` to the verbs of the command line."""
    demo = verb(
        verbs,
        "demo",
        _demo,
        text,
        "demo --dir shards",
    )
    demo.add_argument(
        "--dir", default="shards", metavar="DIR", help="folder to work in (default: %(default)s)"
    )


def _demo(arguments: argparse.Namespace) -> int:
    from wdstrain.demo import demo, next_steps

    with Reporter() as progress:
        rows = demo(arguments.dir, progress)
    result(arguments, dict(rows), rows)
    if not arguments.json:
        print_result("\nNext, with your own data:")
        for step in next_steps(arguments.dir):
            print_result(f"  {step}")
    return 0
