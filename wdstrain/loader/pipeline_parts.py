"""Parts of a pipeline that outlive its streams: options, memory, reader and decoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from wdstrain.decode.batch_slots import Layout, Slots
from wdstrain.decode.decoder import Decoder
from wdstrain.decode.fields import Field
from wdstrain.decode.label_columns import LabelColumn, label_columns
from wdstrain.decode.task import Collate, DecoderSettings, Transform
from wdstrain.decode.worker_processes import WorkerProcesses
from wdstrain.decode.workers import DecoderThreads, InFlightLimits, in_flight_limits
from wdstrain.loader.task_blocks import TaskBuilder
from wdstrain.order.order import Order
from wdstrain.reader.reader import Reader
from wdstrain.reader.resources import ReadOptions, ReadResources
from wdstrain.runtime.options import size_setting
from wdstrain.shards.index import Index
from wdstrain.storage.shard_cache import Cache

# Bytes that are read ahead, beyond half a window.
_READ_AHEAD = "WDSTRAIN_READ_AHEAD", 64 << 20
_SPARE_SLOTS = 4  # batches that the user may keep before further ones are copies


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of a pipeline; those without a comment are as in `Loader`.

    takes_rng: the transform is called with (sample, rng). context: start method of worker
    processes. sources: of a mixture, the first sample id of each source; batches then name the
    source of each sample. patience: seconds without a batch until a stall is logged; 0: never.
    """

    fields: Mapping[str, Field] | None
    transform: Transform | None
    takes_rng: bool
    collate_fn: Collate | None
    on_error: str
    num_workers: int
    context: str | None
    cache: Cache | None = None
    sources: Mapping[str, int] | None = None
    patience: float = 0


@dataclass
class StageTotals:
    """Counts and seconds of the stages since a pipeline was made, by the names of `EpochStats`."""

    bytes: int = 0
    fetched: int = 0
    cached: int = 0
    retries: int = 0
    read_seconds: float = 0.0
    shuffle_seconds: float = 0.0
    parse_seconds: float = 0.0
    decode_seconds: float = 0.0
    compute_seconds: float = 0.0
    queued_seconds: float = 0.0
    collate_seconds: float = 0.0
    handoff_seconds: float = 0.0
    copies: int = 0
    reread: int = 0

    def since(self, before: StageTotals) -> dict[str, float]:
        """Return the differences to earlier totals, by name."""
        return {name: value - vars(before)[name] for name, value in vars(self).items()}


@dataclass(frozen=True, kw_only=True)
class PipelineParts:
    """Parts of a pipeline, and the data that it is made for.

    plans: returns the plan of an epoch. columns: labels that the index gives, by name.
    totals: of the stages, without those of `reader` and `slots`.
    """

    index: Index
    plans: Callable[[int], Order]
    rank: int
    options: PipelineOptions
    reader: Reader
    columns: Mapping[str, LabelColumn]
    slots: Slots
    task_builder: TaskBuilder
    decoder: Decoder
    workers: DecoderThreads | WorkerProcesses
    totals: StageTotals = field(default_factory=StageTotals)


def build_parts(
    index: Index, plans: Callable[[int], Order], rank: int, options: PipelineOptions
) -> PipelineParts:
    """Return the parts of a pipeline. No thread and no process is started.

    Raises ShardError for a sample that is too large for this machine's memory.
    """
    plan, fields, replaces = plans(0), options.fields, options.on_error != "raise"
    columns = label_columns(fields or {}, index)
    if fields is not None:
        fields = {name: field for name, field in fields.items() if name not in columns}
    examples = {
        name: field.example for name, field in (fields or {}).items() if field.example is not None
    }
    layout = Layout.of(examples, plan.batch_size)
    needed = None
    if fields is not None:
        needed = {name for field in fields.values() for name in field.names}
    is_inline = not fields and options.transform is None  # bytes are taken from the arena itself
    batch_bytes = plan.batch_size * sum(shard.bytes for shard in index.shards) / max(1, len(index))
    limits = in_flight_limits(options.num_workers, plan.batch_size, layout.size, batch_bytes)
    if is_inline:
        limits = InFlightLimits(batches=1, decoders=0)
    slots = Slots(layout, busy=limits.batches + 1, spare=_SPARE_SLOTS)
    read_options = ReadOptions(
        ahead=size_setting(*_READ_AHEAD),
        in_flight=limits.batches + 1,
        needed_fields=needed,
        skip_unreadable=replaces,
        cache=options.cache,
    )
    reader = Reader(ReadResources(index, plans, rank, read_options, slots))
    settings = DecoderSettings(
        field_names=index.fields,
        layout=layout,
        fields=fields,
        transform=options.transform,
        takes_rng=options.takes_rng,
        collate_fn=options.collate_fn,
        on_error=options.on_error,
        seed=plan.seed,
    )
    decoder = Decoder(settings, reader.memory, slots.memory)
    workers: DecoderThreads | WorkerProcesses = DecoderThreads(decoder, limits)
    if options.num_workers and not is_inline:
        workers = WorkerProcesses(decoder, limits, options.context)
    builder = TaskBuilder(index, needed, with_keys=options.transform is not None)
    return PipelineParts(
        index=index,
        plans=plans,
        rank=rank,
        options=options,
        reader=reader,
        columns=columns,
        slots=slots,
        task_builder=builder,
        decoder=decoder,
        workers=workers,
    )
