"""The folder of a run, and what a run says about itself: progress, lines, events, the report.

What cannot be written is reported, and the run goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from pyarrow import parquet

from wdstrain.errors import WdstrainError
from wdstrain.loader.stats import EpochStats
from wdstrain.report.printing import printable
from wdstrain.runtime.file_locks import lock_file, unlock_file
from wdstrain.shards.declare import recorded_counts
from wdstrain.shards.index import Index
from wdstrain.storage.files import check_folder_output, disk_errors, put_whole, write_whole
from wdstrain.training.checkpoint import CHECKPOINTS
from wdstrain.training.config import CONFIG, METRICS, STAGES, read_lines, refuse
from wdstrain.training.data import addresses, count_pixels
from wdstrain.training.heads import MaskHead
from wdstrain.training.metrics import classes_of
from wdstrain.training.report import History, largest, metric_text, write_report
from wdstrain.training.run import Run
from wdstrain.training.tasks import Monitor, Task

STEPS, REPORT, BOARD, RECORDED = "steps.jsonl", "report.html", "tensorboard", "recorded.parquet"
_RUN_FILES = {CONFIG, METRICS, STEPS, REPORT, BOARD, RECORDED, CHECKPOINTS}
_LOCK = ".lock"
_ON_DEVICE = ("compute", "optimizer")
_SHORTEST, _LONGEST = 0.5, 10.0  # seconds between looks at the loss, for which a GPU is waited for
_LOGGED = 100  # classes whose numbers are in the line of an epoch
_NAMED = 8  # classes in a sentence
# Shorter epochs are dominated by their start: threads begin, the first batches are read.
_FEWEST_STEPS, _FEWEST_SECONDS = 100, 60.0

# (metrics, details) of each pass of validation: "val" and, of weights without averaging, "val_raw"
Passes = dict[str, tuple[dict[str, float], dict[str, Any]]]


# --- the folder -----------------------------------------------------------------------------------
# `metrics.jsonl` has a line for each epoch, `steps.jsonl` one every 0.5 to 10 s. A resumed run
# first removes the lines after its checkpoint from both. One process at a time uses a folder.


def check_out(folder: str, *, overwrite: bool, resume: bool) -> None:
    """Raise UsageError for a folder that no run, or not this one, may write to.

    Raises StorageError if it cannot be written.
    """
    # hidden files are the lock, and incomplete files that a kill left
    names = {path.name for path in Path(folder).glob("[!.]*")}
    refuse(resume and overwrite, "resume and overwrite exclude each other.", "Give one of them.")
    refuse(
        names and CONFIG not in names,
        f"{folder} holds files that are not of a run.",
        "Choose another folder.",
    )
    refuse(
        names and not overwrite and not resume,
        f"{folder} holds a run already.",
        "Choose another folder, continue with {resume}, or replace it with {overwrite}.",
    )
    check_folder_output(folder)


def open_folder(
    folder: str, config: str, stack: ExitStack, *, overwrite: bool, resume: bool
) -> None:
    """Make the folder of a new run, or with `resume` continue that of an earlier one.

    config: text of config.toml. stack: unlocks the folder for other processes.
    """
    check_out(folder, overwrite=overwrite, resume=resume)
    with disk_errors(folder, "Choose another folder."):
        os.makedirs(folder, exist_ok=True)
        lock = lock_file(os.path.join(folder, _LOCK))
        refuse(
            lock is None,
            f"another process is training into {folder}.",
            "Wait for it, or choose another folder.",
        )
        stack.callback(unlock_file, lock)
        for path in (Path(folder, name) for name in _RUN_FILES if overwrite):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for path in Path(folder).rglob(".*.tmp"):  # a kill left it
            path.unlink()
        write_whole(os.path.join(folder, CONFIG), config.encode("utf-8", "replace"))
        os.makedirs(os.path.join(folder, CHECKPOINTS), exist_ok=True)


def append_line(path: str, line: Mapping[str, Any]) -> None:
    """Append a line to metrics.jsonl or steps.jsonl."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(strict_json(line) + "\n")


def rewind(folder: str, history: Sequence[Mapping[str, Any]], position: tuple[int, int]) -> None:
    """Keep these lines in metrics.jsonl, and in steps.jsonl those up to (epoch, step)."""
    steps = [
        line
        for line in read_lines(os.path.join(folder, STEPS))
        if (line["epoch"], line["step"]) <= position
    ]
    for name, lines in ((METRICS, history), (STEPS, steps)):
        text = "".join(f"{strict_json(line)}\n" for line in lines)
        write_whole(os.path.join(folder, name), text.encode())


def strict_json(value: Any) -> str:
    """Return JSON for every program: NaN and infinity, which JSON lacks, are null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None))


def _begin(run: Run, stack: ExitStack) -> None:
    """Check the masks of a run, and open its folder at its position. stack: closes it."""
    arguments, head = run.arguments, run.task.heads[0]
    if isinstance(head, MaskHead):
        is_strict = run.config.on_error == "raise"
        counts = count_pixels(run.train_set, head, is_strict=is_strict)
        run.setup.reporter.line(f"pixels: {counts_text(counts)}")
        if run.val_set is not None and is_strict:
            count_pixels(run.val_set, head, is_strict=True)
    val = addresses(arguments.val) if arguments.val is not None else None
    open_folder(
        run.folder,
        run.config.toml({"train": addresses(arguments.urls), "val": val}),
        stack,
        overwrite=arguments.overwrite,
        resume=arguments.resume,
    )
    rewind(run.folder, run.state.history, (run.state.epoch, run.state.step))


# --- while it runs --------------------------------------------------------------------------------


class RunLog:
    """Shows the progress of a run, checks its losses, and writes to its folder.

    It looks at the sums of an epoch now and then, not at every step. seconds: by stage since the
    epoch was started here, as the loader's report has them. Steps of events count from the start of
    the run.
    """

    def __init__(self, run: Run, stack: ExitStack) -> None:
        """Only the first process writes. It removes lines and events after the position of the run.

        stack: closes the folder.
        """
        self._run, state = run, run.state
        if run.is_leader:
            _begin(run, stack)
        self._board: Any = None  # opened with the first event, and again after a failure
        self._next = state.epoch * run.steps + state.step + 1  # step of the next event
        stack.callback(self._close_board)

    def start_epoch(self) -> None:
        """Begin to measure."""
        self.timer = StageTimer(self._run.setup.device)
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._at, self._sums, self._text = time.monotonic(), self._run.sums.read(), ""

    def update(self) -> None:
        """Show progress; look at the sums if enough time passed."""
        run, state, now = self._run, self._run.state, time.monotonic()
        pause = min(_LONGEST, _SHORTEST + (now - run.started_at) / 300)
        if now - self._at >= pause or state.step >= run.steps:
            self._look(now)
        done, total = state.epoch * run.steps + state.step, run.config.epochs * run.steps
        text = ", ".join(filter(None, (run.title, self._text)))
        run.setup.reporter.step("training", done, total, text, "")

    def _look(self, now: float) -> None:
        """Check the sums, and write the figures of the last second or so."""
        run, state = self._run, self._run.state
        window = self.timer.window(run.loader.report()["copy_seconds"])
        for seconds in (state.seconds, self.seconds):
            for name in STAGES:
                seconds[name] += window[name]
        sums, whole = run.sums.read(), max(1e-9, sum(window.values()))
        if sums["overflowed"] or sums["skipped"]:
            run.check_finite(sums)
        new = {name: sums[name] - self._sums[name] for name in sums}
        rate = new["samples"] * run.setup.distributed.size / whole
        self._at, self._sums = now, sums
        self._text = f"{progress_text(run.task, sums, state.seconds)}, {rate:.0f}/s"
        if not run.is_leader:
            return
        values = {"loss": mean_loss(new), "lr": run.lr, "samples_per_second": rate}
        spent = {f"{name}_seconds": round(seconds, 6) for name, seconds in window.items()}
        with self._going_on():
            append_line(
                self._path(STEPS), {"epoch": state.epoch, "step": state.step} | values | spent
            )
        events = {f"step/{name}": value for name, value in values.items()}
        events |= {f"time/{name}": window[name] / whole for name in STAGES}
        self._add_events(events, state.epoch * run.steps + state.step)

    def epoch(self, details: Mapping[str, Any], best: str, recorded: Any) -> None:
        """Write the metrics of the last epoch and the report.

        details: of its validation. best: sentence on the best epoch. recorded: table or None.
        """
        metrics = self._run.state.history[-1]
        with self._going_on():
            append_line(self._path(METRICS), metrics)
        parts = {"train": metrics, **{n: metrics.get(n, {}) for n in ("val", "val_raw")}}
        values = {
            f"{part}/{name}": value
            for part, figures in parts.items()
            for name, value in figures.items()
            if isinstance(value, (int, float)) and name not in ("epoch", "lr", "is_best")
        }
        self._add_events(values, (metrics["epoch"] + 1) * self._run.steps)
        with self._going_on():
            steps = read_lines(self._path(STEPS))
            write_report(self._path(REPORT), self._run, best, steps, details, recorded)
        if recorded is not None:
            with self._going_on(), put_whole(self._path(RECORDED)) as file:
                parquet.write_table(recorded, file)

    def _add_events(self, values: Mapping[str, float], step: int) -> None:
        board, self._board = self._board, None  # a failed one writes no more
        with self._going_on():
            if board is None:
                from torch.utils.tensorboard import SummaryWriter  # takes a second to import

                board = SummaryWriter(self._path(BOARD), purge_step=self._next)
            for name, value in values.items():
                board.add_scalar(name, value, step)
            board.flush()
            self._board, self._next = board, step + 1

    def _path(self, name: str) -> str:
        return os.path.join(self._run.folder, name)

    def _close_board(self) -> None:
        if self._board is not None:
            with suppress(OSError):
                self._board.close()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Report errors of writing."""
        try:
            yield
        except (OSError, WdstrainError) as error:  # pictures of samples are read for the report
            cause = getattr(error, "strerror", None) or str(error).rstrip(".")
            self._run.setup.reporter.line(
                f"{self._run.folder} cannot be written: {cause}. Training goes on."
            )


class StageTimer:
    """Adds up seconds by stage: `lap` adds the time since the lap before to a stage.

    On a CPU the clock times each stage. A CUDA device works asynchronously, so events in its stream
    time the stages that run there. Its idle time, up to the wait of the loop, is waiting for data,
    and as much of it as batches were being copied is waiting for copies. Events are read once per
    window, so steps do not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._copied = device.type == "cuda", 0.0
        self._laps: list[tuple[str, Any, Any]] = []
        self._begin = self._last = self._mark()

    def lap(self, stage: str) -> None:
        """Add the time since the lap before to a stage."""
        before, self._last = self._last, self._mark()
        self._laps.append((stage, before, self._last))

    def window(self, copied: float) -> dict[str, float]:
        """Return seconds by stage since the last window. Waits for a CUDA device.

        copied: seconds for which batches were being copied to the device, since the start.
        """
        if self._cuda:
            torch.cuda.synchronize()
        seconds, end = dict.fromkeys(STAGES, 0.0), self._mark()
        whole = end[0] - self._begin[0]
        for stage, (at, event), (after, next_event) in self._laps:
            is_on_device = self._cuda and stage in _ON_DEVICE
            seconds[stage] += event.elapsed_time(next_event) / 1e3 if is_on_device else after - at
        if self._cuda:
            idle = max(0.0, whole - sum(seconds[stage] for stage in _ON_DEVICE))
            waited = min(seconds["data"], idle)
            seconds["copy"] = min(waited, copied - self._copied)
            seconds["data"] = waited - seconds["copy"]
        seconds["other"] = max(0.0, whole - sum(seconds.values()))
        self._copied, self._laps = copied, []
        self._begin = self._last = end
        return seconds

    def _mark(self) -> tuple[float, Any]:
        """Return the time, and on a CUDA device an event in its stream."""
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
        return time.perf_counter(), event


# --- an epoch in figures and in words -------------------------------------------------------------


def mean_loss(sums: Mapping[str, float]) -> float:
    """Return the mean loss of the samples whose loss is finite."""
    return sums["loss"] / max(1.0, sums["samples"] - sums["overflowed"])


def stall_share(seconds: Mapping[str, float]) -> float:
    """Return the share of the time in which a step waited for data. seconds: by stage."""
    return (seconds["data"] + seconds["copy"]) / max(1e-9, sum(seconds.values()))


def epoch_metrics(run: Run, passes: Passes) -> dict[str, Any]:
    """Return the line of the epoch in metrics.jsonl. Collective.

    Seconds and verdict are those of the first process.
    """
    state, sums = run.state, run.sums.read(run.setup.distributed)
    samples, seconds = sums["samples"], sum(state.seconds.values())
    metrics: dict[str, Any] = {
        "epoch": state.epoch,
        "loss": mean_loss(sums),
        "samples": int(samples),
        "bad": int(sums["bad"]),
        "seconds": seconds,
        **{f"{name}_seconds": value for name, value in state.seconds.items()},
        "samples_per_second": samples / max(1e-9, seconds),
        "stall": stall_share(state.seconds),
        "left_out": run.loader.plan(state.epoch).left_out,
        "lr": run.lr,
        "verdict": state.verdict,
        **{
            run.task.metric_name(head, "accuracy"): sums[f"head {head.name}"] / max(1.0, samples)
            for head in run.task.heads
            if f"head {head.name}" in sums
        },
    }
    if run.scaler.is_enabled():
        metrics["skipped_steps"] = int(sums["skipped"])
    validation = {name: dict(values) for name, (values, _) in passes.items()}
    return metrics | validation | (classes_of(passes["val"][1], _LOGGED) if passes else {})


def progress_text(task: Task, sums: Mapping[str, float], seconds: Mapping[str, float]) -> str:
    """Return loss, accuracy and stall of the epoch so far."""
    hits = [sums[f"head {head.name}"] for head in task.heads if f"head {head.name}" in sums][:1]
    shares = [f"acc {count / max(1.0, sums['samples']):.1%}" for count in hits]
    return ", ".join([f"loss {mean_loss(sums):.3f}", *shares, f"stall {stall_share(seconds):.0%}"])


def epoch_lines(title: str, history: History, monitor: str) -> Iterator[str]:
    """Yield the lines on the last epoch: its figures, and a verdict that differs from the last."""
    metrics = history[-1]
    val = metrics.get("val", {})
    validation = f"val {metric_text(monitor, val[monitor])}, " if monitor in val else ""
    rate = f"{metrics['samples_per_second']:.0f} samples/s, stall {metrics['stall']:.1%}"
    yield f"{title}: loss {metrics['loss']:.3f}, {validation}{rate}"
    if metrics.get("skipped_steps"):
        yield f"  {metrics['skipped_steps']} steps overflowed 16 bits and were skipped"
    if metrics["verdict"] not in [epoch["verdict"] for epoch in history[-2:-1]]:
        yield textwrap.indent(textwrap.fill(metrics["verdict"], 76), "  ")


def best_sentence(history: History, best: Mapping[str, float] | None, monitor: Monitor) -> str:
    """Return the epoch of best.pt and how it was chosen."""
    same = (i for i, line in enumerate(history, 1) if best and line.get("val") == best)
    title = f"best.pt is of epoch {next(same, len(history))}"
    if best is None:
        return f"{title}, the last: there was no validation"
    if monitor.name not in best:
        return f"{title}: {monitor.name} was undefined"
    rank = "highest" if monitor.maximizes else "lowest"
    return f"{title}: {metric_text(monitor.name, best[monitor.name])}, the {rank} of all epochs"


def samples_sentence(index: Index, task: Task) -> str:
    """Return the number of samples, and of those of each class where the index says it."""
    parts = [f"{len(index)} samples"]
    for head in task.heads:
        if counts := recorded_counts(index, head.target):
            parts.append(f"{printable(head.name)}: {counts_text(counts)}")
    return "; ".join(parts)


def counts_text(counts: Mapping[str, int]) -> str:
    """Return the counts of the most frequent classes, and the classes without any."""
    named = [f"{printable(name)} {n}" for name, n in largest(counts, _NAMED).items() if n]
    if len(counts) > _NAMED:
        named.append(f"and {len(counts) - _NAMED} classes more")
    missing = [printable(name) for name, n in counts.items() if not n][:_NAMED]
    return ", ".join(named) + (f"; none of: {', '.join(missing)}" if missing else "")


def verdict(report: Mapping[str, Any], seconds: Mapping[str, float], consumer: str) -> str:
    """Return what limited the epoch. report: of the loader. seconds: by stage, as in the report.

    A short epoch has a bottleneck only if the model waited most of the time for one slow stage.
    """
    stats = EpochStats(**{name: report[name] for name in EpochStats.__dataclass_fields__})
    stats.wait_seconds = seconds["data"] + seconds["copy"]
    stats.loop_seconds = sum(seconds.values()) - stats.wait_seconds
    is_short = stats.batches < _FEWEST_STEPS and sum(seconds.values()) < _FEWEST_SECONDS
    if is_short and (stats.stall < 0.5 or not stats.is_input_bound):
        return f"no bottleneck is named: epochs of fewer than {_FEWEST_STEPS} steps are too short"
    return stats.verdict_of(consumer, seconds["compute"] + seconds["optimizer"])
