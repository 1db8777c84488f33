"""Parts of a pipeline: options, memory, reader and decoders, which stay while streams begin and end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from wdstrain.decode.batch_slots import Layout, Slots
from wdstrain.decode.decoder import Decoder
from wdstrain.decode.fields import Field
from wdstrain.decode.flight import flight_of
from wdstrain.decode.label_fields import is_light
from wdstrain.decode.settings import Collate, DecoderSettings, Transform
from wdstrain.decode.worker_processes import WorkerProcesses
from wdstrain.decode.workers import DecoderThreads, InlineDecoder, Workers
from wdstrain.loader.task_blocks import TaskBuilder
from wdstrain.order.plan import Order
from wdstrain.reader.direct_fields import direct_fields
from wdstrain.reader.limits import batches_begun
from wdstrain.reader.reader import Reader
from wdstrain.reader.resources import ReadOptions
from wdstrain.reader.slot_sink import SlotSink
from wdstrain.shards.index import Index
from wdstrain.storage.shard_cache import Cache

AHEAD_BYTES = 64 << 20  # bytes that are read ahead, beyond half a window
DIRECT_AHEAD_BYTES = 128 << 20  # the same where arrays are read straight into batches
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
    on_bad: str
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
    collate_seconds: float = 0.0
    handoff_seconds: float = 0.0
    copies: int = 0
    reread: int = 0

    def since(self, before: StageTotals) -> dict[str, float]:
        """Return the differences to earlier totals, by name."""
        return {name: value - vars(before)[name] for name, value in vars(self).items()}


@dataclass(frozen=True)
class PipelineParts:
    """Parts of a pipeline, and what it is made for.

    plans: returns the plan of an epoch. sink: reader of arrays that go straight into batches, if
    any do. totals: of the stages; those of `reader` and `slots` are not in it.
    """

    index: Index
    plans: Callable[[int], Order]
    rank: int
    options: PipelineOptions
    reader: Reader
    sink: SlotSink | None
    slots: Slots
    task_builder: TaskBuilder
    decoder: Decoder
    workers: Workers
    totals: StageTotals = field(default_factory=StageTotals)


def build_parts(
    index: Index, plans: Callable[[int], Order], rank: int, options: PipelineOptions
) -> PipelineParts:
    """Return the parts of a pipeline. No thread and no process is started."""
    plan, fields, replaces = plans(0), options.fields, options.on_bad != "raise"
    layout = Layout.of(
        {name: one.example for name, one in (fields or {}).items() if one.example is not None},
        plan.batch_size,
    )
    direct = direct_fields(index, fields, layout, plan)
    decoded = needed = None
    if fields is not None:
        decoded = {name: one for name, one in fields.items() if name not in direct}
        needed = {name for one in decoded.values() for name in one.names}
    # The loop's own thread takes bytes from the arena. It also reads numbers beside arrays, because
    # sending them to a decoder takes longer.
    is_inline = options.transform is None and (
        decoded is None or (bool(direct) and all(map(is_light, decoded.values())))
    )
    batch_bytes = plan.batch_size * sum(shard.bytes for shard in index.shards) / max(1, len(index))
    flight = flight_of(options.num_workers, plan.batch_size, layout.size, batch_bytes)
    busy = 1 if is_inline else flight.batches
    ahead = DIRECT_AHEAD_BYTES if direct else AHEAD_BYTES
    begun = batches_begun(index, plan, rank, ahead) if direct else 0
    slots = Slots(layout, busy=busy + begun + 1, spare=_SPARE_SLOTS)
    sink = SlotSink(index, direct.values(), slots, replaces) if direct else None
    read_options = ReadOptions(
        ahead=ahead,
        in_flight=busy + 1,
        needed_fields=needed,
        skip_unreadable=replaces,
        cache=options.cache,
    )
    reader = Reader(index, plans, rank, read_options, sink)
    settings = DecoderSettings(
        field_names=index.fields,
        layout=layout,
        fields=decoded,
        transform=options.transform,
        takes_rng=options.takes_rng,
        collate_fn=options.collate_fn,
        on_bad=options.on_bad,
        seed=plan.seed,
    )
    decoder = Decoder(settings, reader.memory, slots.memory)
    workers: Workers
    if is_inline:
        workers = InlineDecoder(decoder)
    elif options.num_workers:
        workers = WorkerProcesses(decoder, flight, options.context)
    else:
        workers = DecoderThreads(decoder, flight)
    builder = TaskBuilder(index, needed, with_keys=options.transform is not None, landing=sink)
    return PipelineParts(
        index, plans, rank, options, reader, sink, slots, builder, decoder, workers
    )
