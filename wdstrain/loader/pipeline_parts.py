"""Construction of a pipeline: which fields are read straight into batches, who decodes, and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from wdstrain.decode.batch_slots import Layout, Slots
from wdstrain.decode.decoder import Collate, Decoder, Transform
from wdstrain.decode.fields import Field
from wdstrain.decode.flight import Flight, flight_of
from wdstrain.decode.label_fields import is_light
from wdstrain.decode.worker_processes import WorkerProcesses
from wdstrain.decode.workers import DecoderThreads, InlineDecoder, Workers
from wdstrain.loader.task_blocks import TaskBuilder
from wdstrain.order.plan import Order
from wdstrain.reader.limits import batches_begun
from wdstrain.reader.reader import Reader
from wdstrain.reader.resources import ReadOptions
from wdstrain.reader.slot_sink import SlotSink, direct_fields
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

    @property
    def replaces(self) -> bool:
        """Whether bad samples are replaced or marked."""
        return self.on_bad != "raise"

    @property
    def marks(self) -> bool:
        """Whether the rows of bad samples stay empty."""
        return self.on_bad == "mark"


@dataclass(frozen=True)
class PipelineParts:
    """Parts of a pipeline. sink: reader of arrays that go straight into batches, if any do."""

    reader: Reader
    sink: SlotSink | None
    slots: Slots
    task_builder: TaskBuilder
    decoder: Decoder
    workers: Workers


def build_parts(
    index: Index, plans: Callable[[int], Order], rank: int, options: PipelineOptions
) -> PipelineParts:
    """Return the parts of a pipeline. No thread and no process is started."""
    plan, fields = plans(0), options.fields
    examples = {
        name: field.example for name, field in (fields or {}).items() if field.example is not None
    }
    layout = Layout.of(examples, plan.batch_size)
    direct = direct_fields(index, fields, layout, plan)
    decoded = None
    if fields is not None:
        decoded = {name: field for name, field in fields.items() if name not in direct}
    is_inline = _decodes_inline(options, decoded, has_direct=bool(direct))
    flight = _flight(index, plan, layout, options.num_workers)
    busy = 1 if is_inline else flight.batches
    ahead = DIRECT_AHEAD_BYTES if direct else AHEAD_BYTES
    begun = batches_begun(index, plan, rank, ahead) if direct else 0
    slots = Slots(layout, busy=busy + begun + 1, spare=_SPARE_SLOTS)
    sink = SlotSink(index, direct.values(), slots, options.replaces) if direct else None
    needed = None
    if decoded is not None:
        needed = {name for field in decoded.values() for name in field.names}
    read_options = ReadOptions(
        ahead=ahead,
        in_flight=busy + 1,
        needed_fields=needed,
        skip_unreadable=options.replaces,
        cache=options.cache,
    )
    reader = Reader(index, plans, rank, read_options, sink)
    decoder = Decoder(
        names=index.fields,
        fields=decoded,
        transform=options.transform,
        takes_rng=options.takes_rng,
        collate_fn=options.collate_fn,
        replace=options.replaces,
        marks=options.marks,
        seed=plan.seed,
        arena=reader.memory,
        slots=slots.memory,
        layout=layout,
    )
    builder = TaskBuilder(index, needed, with_keys=options.transform is not None, landing=sink)
    workers = InlineDecoder(decoder) if is_inline else _workers(decoder, flight, options)
    return PipelineParts(reader, sink, slots, builder, decoder, workers)


def _decodes_inline(
    options: PipelineOptions, decoded: Mapping[str, Field] | None, *, has_direct: bool
) -> bool:
    """Return whether the loop's own thread decodes.

    It takes bytes from the arena itself. A number beside an array is read sooner than sent away.
    """
    if options.transform is not None:
        return False
    return decoded is None or (has_direct and all(is_light(field) for field in decoded.values()))


def _flight(index: Index, plan: Order, layout: Layout, num_workers: int) -> Flight:
    """Return how many batches are in flight, and how many decoders there are."""
    bytes_of_batch = (
        plan.batch_size * sum(shard.bytes for shard in index.shards) / max(1, len(index))
    )
    return flight_of(num_workers, plan.batch_size, layout.size, bytes_of_batch)


def _workers(decoder: Decoder, flight: Flight, options: PipelineOptions) -> Workers:
    if options.num_workers:
        return WorkerProcesses(decoder, flight, options.context)
    return DecoderThreads(decoder, flight)
