"""The mutants: one-token faults in code that decides about data, and the tests that should see them.

A mutant is (name, old text, new text) below its module. The old text occurs exactly once in the
module. No mutant is equivalent to the package as it is: each changes a value, an order or a refusal
that somebody can see. A module that is rebuilt gets new mutants of the same kinds: comparisons,
limits, signs, dropped checks, dropped words of a key, wrong axes and wrong variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KILLED_LIST = Path(__file__).parent / "killed.txt"

PACKAGES = (
    *(
        "order",
        "shards",
        "storage",
        "reader",
        "decode",
        "augment",
        "loader",
        "webdataset",
        "conversion",
        "training",
    ),
)

# Arguments of pytest for the mutants of a package, the sharpest and quickest first.
TESTS: dict[str, tuple[str, ...]] = {
    "order": (
        "tests/golden/test_orders.py",
        "tests/order",
        "tests/oracle/test_loading.py",
        "tests/loader/test_positions.py",
        "tests/loader/test_loader.py",
    ),
    "shards": (
        "tests/shards",
        "tests/oracle/test_loading.py",
        "tests/oracle/test_converting.py",
        "tests/loader/test_selection.py",
        "tests/inspection",
        "tests/fuzz",
        "tests/robustness/test_hostile.py",
    ),
    "storage": (
        "tests/storage/test_replaced_shards.py",
        "tests/storage/test_odd_servers.py",
        "tests/storage/test_http.py",
        "tests/storage/test_cache.py",
        "tests/oracle/test_loading.py",
        "tests/storage/test_object_store.py",
        "tests/fuzz",
    ),
    "reader": (
        "tests/reader",
        "tests/memory",
        "tests/oracle/test_loading.py",
        "tests/loader/test_loader.py",
        "tests/loader/test_positions.py",
    ),
    "decode": (
        "tests/golden/test_images.py",
        "tests/decode",
        "tests/oracle/test_loading.py",
        "tests/fuzz",
    ),
    "augment": ("tests/golden/test_images.py", "tests/loader/test_gpu_augment.py"),
    "loader": (
        "tests/oracle/test_loading.py",
        "tests/loader/test_positions.py",
        "tests/loader/test_selection.py",
        "tests/loader/test_device.py",
        "tests/loader/test_gpu_augment.py",
        "tests/loader/test_loader.py",
        "tests/order/test_mixture.py",
        "tests/webdataset/test_webdataset.py",
        "tests/loader/test_distributed.py",
    ),
    "webdataset": ("tests/webdataset/test_webdataset.py", "tests/webdataset"),
    "conversion": (
        "tests/golden/test_conversions.py",
        "tests/oracle/test_converting.py",
        "tests/conversion/test_sources.py",
        "tests/conversion/test_tables.py",
        "tests/conversion/test_converting.py",
        "tests/conversion/test_drawn_tables.py",
        "tests/conversion/test_changing_sets.py",
        "tests/conversion/test_label_decisions.py",
        "tests/conversion/test_given_splits.py",
        "tests/conversion/test_table_forms.py",
    ),
    "training": (
        "tests/golden/test_checkpoint_keys.py",
        "tests/oracle/test_training.py",
        "tests/training/test_scores.py",
        "tests/training/test_user_objects.py",
        "tests/training/test_run_truth.py",
        "tests/training/test_training.py",
        "tests/training/test_outcomes.py",
        "tests/training/test_data.py",
        "tests/training/test_inputs.py",
        "tests/training/test_segmentation.py",
        "tests/training/test_trained.py",
        "tests/training/test_resuming.py",
        "tests/training/test_torchrun.py",
    ),
}

# Tests of one module that run before those of its package.
FIRST: dict[str, tuple[str, ...]] = {
    "order/plan.py": ("tests/golden/test_orders.py", "tests/order/test_plan.py"),
    "order/mixture.py": ("tests/order/test_mixture.py",),
    "order/weighted_plan.py": ("tests/order/test_weighted_plan.py",),
    "shards/selection.py": ("tests/shards/test_selection.py", "tests/oracle/test_loading.py"),
    "shards/index_io.py": ("tests/shards/test_index_table.py", "tests/shards/test_index.py"),
    "shards/tar.py": ("tests/shards/test_tar.py",),
    "shards/kinds.py": ("tests/decode/test_label_columns.py", "tests/decode/test_fields.py"),
    "shards/where.py": ("tests/shards/test_selection.py", "tests/oracle/test_selecting.py"),
    "storage/files.py": ("tests/storage/test_replaced_shards.py",),
    "storage/http.py": (
        "tests/storage/test_odd_servers.py::test_addresses_that_expired_are_renewed_once_for_all_files",
        "tests/storage/test_odd_servers.py::test_each_signed_address_is_renewed_by_itself",
        "tests/storage/test_http.py::test_redirects_do_not_pass_secrets_to_other_hosts",
        "tests/storage/test_odd_servers.py",
        "tests/storage/test_http.py",
        "tests/storage/test_replaced_shards.py",
    ),
    "storage/remote.py": (
        "tests/reader/test_reads.py",
        "tests/storage/test_http.py",
        "tests/storage/test_odd_servers.py",
        "tests/storage/test_replaced_shards.py",
        "tests/storage/test_cache.py",
        "tests/oracle/test_loading.py",
    ),
    "storage/retries.py": (
        "tests/storage/test_odd_servers.py::test_a_loader_waits_for_the_next_window_when_a_quota_is_nearly_used",
        "tests/storage/test_odd_servers.py::test_a_wait_that_the_server_asks_for_is_no_silence",
        "tests/storage/test_odd_servers.py::test_all_processes_of_a_machine_wait_when_one_was_refused",
        "tests/storage/test_http.py",
    ),
    "storage/cache.py": (
        "tests/storage/test_cache.py::test_a_part_with_wrong_bytes_does_not_become_a_shard",
        "tests/storage/test_cache.py::test_a_part_of_a_shard_without_a_checksum_is_fetched_again",
        "tests/storage/test_cache.py::test_the_cache_stays_within_its_limit_and_evicts_the_oldest",
        "tests/storage/test_cache.py::test_files_in_use_are_never_evicted",
        "tests/storage/test_cache.py::test_a_forgotten_shard_is_not_put_in_place_by_its_former_download",
        "tests/storage/test_cache.py::test_a_damaged_cached_shard_is_read_from_the_server_and_kept_anew",
        "tests/storage/test_replaced_shards.py",
        "tests/storage/test_cache.py",
    ),
    "reader/reads.py": ("tests/reader/test_reads.py",),
    "reader/reader.py": ("tests/reader/test_blocks.py",),
    "reader/fetch.py": (
        "tests/reader/test_checksums.py",
        "tests/storage/test_replaced_shards.py",
    ),
    "reader/run.py": ("tests/reader/test_read_errors.py",),
    "decode/codecs.py": (
        "tests/golden/test_images.py",
        "tests/decode/test_fields.py",
        "tests/robustness/test_bounds.py",
    ),
    "decode/transforms.py": ("tests/decode/test_images.py", "tests/decode/test_masks.py"),
    "decode/fields.py": ("tests/decode/test_masks.py",),
    "decode/labels.py": ("tests/decode/test_label_columns.py", "tests/decode/test_fields.py"),
    "decode/workers.py": ("tests/decode/test_worker_processes.py",),
    "decode/worker_processes.py": ("tests/decode/test_worker_processes.py",),
    "augment/gpu.py": ("tests/golden/test_images.py", "tests/loader/test_gpu_augment.py"),
    "augment/mixing.py": ("tests/golden/test_images.py", "tests/loader/test_gpu_augment.py"),
    "loader/batch_assembly.py": (
        "tests/decode/test_label_columns.py",
        "tests/loader/test_batch_types.py",
    ),
    "loader/planning.py": (
        "tests/loader/test_positions.py::test_a_state_of_other_samples_is_refused_although_they_are_as_many",
        "tests/loader/test_selection.py",
    ),
    "loader/epoch.py": ("tests/loader/test_positions.py",),
    "loader/options.py": ("tests/loader/test_distributed.py",),
    "loader/pipeline.py": ("tests/loader/test_device.py", "tests/loader/test_closing.py"),
    "loader/loader.py": ("tests/loader/test_positions.py",),
    "loader/mixture.py": ("tests/order/test_mixture.py",),
    "training/models.py": ("tests/training/test_recipes.py",),
    "training/checkpoint.py": ("tests/training/test_recipes.py",),
    "training/heads.py": (
        "tests/training/test_scores.py::test_numbers_far_from_0_are_scored_by_their_differences",
        "tests/training/test_recipes.py",
        "tests/training/test_scores.py",
    ),
    "training/metrics.py": (
        "tests/training/test_recipes.py",
        "tests/training/test_scores.py::test_precision_calibration_and_own_metrics_are_those_of_several_labels",
        "tests/training/test_scores.py",
    ),
    "training/tasks.py": (
        "tests/training/test_recipes.py",
        "tests/training/test_run_truth.py",
    ),
    "training/train.py": (
        "tests/training/test_torchrun.py::test_processes_share_a_batch_and_draw_other_random_numbers",
    ),
    "training/data.py": (
        "tests/training/test_data.py",
        "tests/training/test_torchrun.py::test_processes_share_a_batch_and_draw_other_random_numbers",
    ),
    "training/run.py": ("tests/training/test_resuming.py", "tests/training/test_run_truth.py"),
    "shards/label_kinds.py": ("tests/conversion/test_tables.py",),
    "conversion/listing.py": ("tests/conversion/test_sources.py",),
    "conversion/collect.py": (
        "tests/conversion/test_changing_sets.py",
        "tests/conversion/test_converting.py",
    ),
    "conversion/sources/table_files.py": ("tests/conversion/test_changing_sources.py",),
    "conversion/encode.py": ("tests/conversion/test_resizing.py",),
    "conversion/sources/table.py": (
        "tests/conversion/test_tables.py::test_two_names_of_one_number_stay_two_classes",
    ),
    "conversion/changes.py": ("tests/conversion/test_changing_sets.py",),
    "conversion/staging.py": (
        "tests/conversion/test_changing_sets.py",
        "tests/storage/test_object_store.py",
    ),
}

# Why a mutant is not killed, by its full name.
REASONS: dict[str, str] = {
    "shards/second-end-block": "what follows a zero block is refused by the next check, too",
    "reader/first-failed": "the error hits the first batch that lacks a sample, and each is asked",
    "training/finite-loss": "a step with such a loss makes such weights; only the hint differs",
}

_CHANGES: dict[str, list[tuple[str, str, str]]] = {
    # --- order ---
    "order/plan.py": [
        ("lent-step", "cuts[steps == self.steps - 1] -=", "cuts[steps == self.steps] -="),
        ("repeated-sample", "end if high == count else high", "high"),
        ("last-step", "step[positions >= self.cuts", "step[positions > self.cuts"),
        ("row-of-lane", "self.lanes_of(rank)[:lane]", "self.lanes_of(rank)[lane:]"),
        ("hole-edge", "(line >= self._hole)", "(line > self._hole)"),
        ("shards-each-epoch", '"shards", self.seed, self.epoch', '"shards", self.seed'),
        ("hole-anywhere", "% (self.kept + 1)", "% self.kept"),
        (
            "first-step-edge",
            "places < plan.samples_per_step_per_lane",
            "places <= plan.samples_per_step_per_lane",
        ),
        ("jitter-of-lane", "plan.seed, plan.epoch, lane)", "plan.seed, plan.epoch, 0)"),
        ("repeats-all-lanes", "and all(_ends_early", "and any(_ends_early"),
    ],
    "order/mixture.py": [
        ("window-rounds", "round(window * share)", "int(window * share)"),
        ("seed-of-source", 'key("source", seed, name)', 'key("source", name)'),
        ("step-edge", '[source], position, side="right")', '[source], position, side="left")'),
        ("last-step-fits", "* self.lane_count > total", "* self.lane_count >= total"),
        (
            "deadline-rounds-up",
            "(-(-(taken[source] + 1) * turns // quotas[source]), source)",
            "((taken[source] + 1) * turns // quotas[source], source)",
        ),
    ],
    "order/weighted_plan.py": [
        ("draw-each-epoch", '"occurrences", self.seed, self.epoch', '"occurrences", self.seed'),
        (
            "draws-of-occurrence",
            "return ids + numbers * len(self.weights)",
            "return ids + numbers * 0",
        ),
        (
            "strata-first",
            "np.lexsort((random, turn))",
            "np.lexsort((turn, random))",
        ),
    ],
    "order/rng.py": [
        ("words-separated", '"\\x1f".join(', '"".join('),
    ],
    # --- shards ---
    "shards/columns.py": [
        ("whole-or-number", "if match[1] or match[2]", "if match[1] and match[2]"),
        (
            "classes-alike",
            "len({c.has_names for c in present}) > 1",
            "len({c.has_names for c in present}) > 2",
        ),
    ],
    "shards/kinds.py": [
        (
            "class-below-count",
            "0 <= number < (self._count or math.inf)",
            "0 <= number <= (self._count or math.inf)",
        ),
        (
            "whole-number",
            "isinstance(value, float) and number != value",
            "isinstance(value, float) and number > value",
        ),
        (
            "name-before-number",
            "named is not None and (self._by_name or not is_number)",
            "named is not None and (self._by_name and not is_number)",
        ),
    ],
    "shards/where.py": [
        ("chain-of-comparisons", "node.ops, values, values[1:]", "node.ops, values, values"),
        ("zero-is-false", "return pc.not_equal(value, 0)", "return pc.not_equal(value, 1)"),
    ],
    "shards/offsets.py": [
        ("known-checksums", "zip(parts, (0, 0, 1)", "zip(parts, (0, 1, 1)"),
        (
            "order-of-members",
            "np.lexsort((offset[place, row], row))",
            "np.lexsort((row, offset[place, row]))",
        ),
    ],
    "shards/index.py": [
        ("letters-of-keys", "column(0).take(as_arrow(ids))", "column(0).slice(0, len(ids))"),
        ("read-verified", "crc32(value) != crc", "crc32(value) == 0"),
        ("gap-is-read", "(between > _GAP)", "(between <= _GAP)"),
    ],
    "shards/resolve.py": [
        (
            "newer-by-any-time",
            "max(status.st_mtime_ns, status.st_ctime_ns)",
            "min(status.st_mtime_ns, status.st_ctime_ns)",
        ),
        ("several-splits", "len(first) > 1:", "len(first) > 2:"),
        (
            "state-of-shard",
            "status.st_size == shard.bytes and is_state",
            "status.st_size == shard.bytes or is_state",
        ),
        ("only-new-shards", "if path not in known]", "if path in known]"),
    ],
    "shards/selection.py": [
        ("sample-seed", '"sample", seed), kind', '"sample"), kind'),
        ("share-left", "share / left", "share * left"),
        ("largest-lack", "lacking.index(max(lacking))", "lacking.index(min(lacking))"),
    ],
    "shards/declare.py": [
        ("newer-shard-is-read", "if not is_newer(new", "if is_newer(new"),
    ],
    "shards/index_io.py": [
        ("identity-of-table", '["id"].encode() != identity:', '["id"].encode() == identity:'),
        ("field-inside-end", "(size <= high - offset)", "(size <= high - low)"),
        (
            "overlap-refused",
            "(low[1:] < high[:-1]).any()",
            "(low[1:] < high[:-1]).all()",
        ),
    ],
    "shards/label_kinds.py": [
        (
            "numbers-of-classes",
            "ordered[0] >= 0 and ordered[-1]",
            "ordered[0] > 0 and ordered[-1]",
        ),
        ("negative-numbers", "if low < -1 or", "if low < 0 or"),
    ],
    "shards/tar.py": [
        ("adjacent-fields", "if key in keys:", "if key == keys:"),
        ("second-end-block", "zeros < len(END),", "zeros < BLOCK,"),
        ("data-after-end", "zeros < len(end),", "zeros < len(END),"),
    ],
    # --- storage ---
    "storage/http.py": [
        (
            "secrets-to-own-server",
            "if server_of(address) == server else",
            "if server_of(address) or server else",
        ),
        ("expired-target", "and 400 <= response.status < 500", "and 500 <= response.status < 500"),
        ("missing-page", "is_page and urlsplit(address)", "is_page or urlsplit(address)"),
        (
            "range-begins",
            "match is None or int(match[1] or start) != start",
            "match is None or int(match[1] or start) > start",
        ),
        (
            "fresh-time",
            "(sent - modified).total_seconds() > 1",
            "(sent - modified).total_seconds() >= 0",
        ),
        ("compressed", 'coding.lower() != "identity" and (', 'coding.lower() == "gzip" and not ('),
        ("renewed-once", "_renewed[key][1] < sent", "_renewed[key][1] > sent"),
        ("path-of-renewal", "if fresh.path != old.path:", "if fresh.path == old.path:"),
        ("query-of-renewal", "old.netloc, old.query))", "old.netloc, old.path))"),
    ],
    "storage/remote.py": [
        ("size-of-object", "if total not in (None, self.size):", "if total in (None, self.size):"),
        ("range-for-quota", "max(RANGE_BYTES, int(d", "min(RANGE_BYTES, int(d"),
        ("same-version", "if self.tag and not response.is_v", "if self.tag and response.is_v"),
        (
            "response-of-process",
            "response.process == os.getpid()\n",
            "response.process != os.getpid()\n",
        ),
    ],
    "storage/retries.py": [
        ("announced-wait", "if silent >= limit and not asked:", "if silent >= limit or not asked:"),
        ("quota-used-up", 'stated["r"] <= min(', 'stated["r"] < min('),
        ("wait-of-others", "max(begin, os.stat(", "min(begin, os.stat("),
    ],
    "storage/cache.py": [
        (
            "checksum-of-shard",
            "if sha256 and _sha256(file)",
            "if not sha256 and _sha256(file)",
        ),
        ("needs-identity", "not (sha256 or tag)", "not (sha256 or path)"),
        ("unknown-prefix", "if not sha256 or os.fstat(file", "if sha256 and os.fstat(file"),
        ("size-of-shard", ".st_size == size:", ".st_size <= size:"),
        ("least-recent-first", "in sorted(cached):", "in sorted(cached, reverse=True):"),
        ("path-of-version", "[path, tag, str(size)]", "[path, str(size)]"),
        ("limit-holds", "return total <= self.limit", "return total != self.limit"),
        (
            "file-of-download",
            "os.path.samestat(os.stat(part), os",
            "os.path.samestat(os.fstat(file.fileno()), os",
        ),
    ],
    "storage/files.py": [
        ("state-of-file", "now[0] == then[0] and (", "now[0] == then[0] or ("),
    ],
    # --- reader ---
    "reader/reads.py": [
        ("between-shards", "(np.diff(shard) != 0) |", "(np.diff(shard) < 0) |"),
        ("backwards", "| ((gap < 0) & ~is_repeated)", "| ((gap < 0) & is_repeated)"),
        ("large-gap", "(gap > GAP) |", "(gap < GAP) |"),
        ("before-the-step", "places.step >= step", "places.step > step"),
        ("block-of-gaps", "sizes.cumsum()", "extent[own].cumsum()"),
    ],
    "reader/reader.py": [
        ("last-sample", "if not used[1]:", "if used[1]:"),
        ("room", "if size <= stop - start:", "if size < stop - start:"),
        ("neighbor", "self._free[at][0] == stop:", "self._free[at][0] >= stop:"),
    ],
    "reader/run.py": [
        (
            "first-failed",
            "self._failed_batch <= batch.number",
            "self._failed_batch == batch.number",
        ),
        ("before-failed", "read.batch < batch", "read.batch <= batch"),
        ("all-arrived", "(table[0, start:stop] >= 0).all()", "(table[0, start:stop] >= 0).any()"),
    ],
    "reader/fetch.py": [
        ("known-crc", "& (members.crc != 0)", "& (members.crc == 0)"),
        ("gaps", "target = self._scratch[", "self._scratch["),
        ("replaced", "if not needs_headers(", "if needs_headers("),
        ("read-again", "find().keys() - bad.keys()", "find().keys() & bad.keys()"),
    ],
    # --- decode ---
    "decode/codecs.py": [
        ("box-of-stored", "left = width - left - w if", "left = height - left - w if"),
        (
            "end-marker",
            'image.format == "JPEG" and b"\\xd9" not in',
            'image.format == "JPEG" and b"\\xda" not in',
        ),
        ("mask-depth", "if depth in (2, 4) else numbers", "if depth in (1, 4) else numbers"),
        ("scans-counted", 'sum(marker == b"\\xda"', 'any(marker == b"\\xda"'),
        ("photometric", "tags.get(_TIFF_PHOTOMETRIC) == 0", "tags.get(_TIFF_PHOTOMETRIC) == 1"),
    ],
    "decode/transforms.py": [
        (
            "crop-edge",
            "if min(w, h) > 0 and exact_w <= width and exact_h <= height:",
            "if min(w, h) > 0 and w < width and h < height:",
        ),
        (
            "crop-top",
            "top = int(draws[_TOP_DRAW] * (height - h + 1))",
            "top = int(draws[_TOP_DRAW] * (height - h))",
        ),
        (
            "narrow-crop",
            "min(max(width / height, ratio[0]), ratio[1])",
            "max(max(width / height, ratio[0]), ratio[1])",
        ),
        ("mask-flip", "draws[FLIP_DRAW] < 0.5", "draws[FLIP_DRAW] > 0.5"),
    ],
    "decode/fields.py": [
        ("nearest-center", "+ 1) * stored) // (2 * wanted)", ") * stored) // (2 * wanted)"),
    ],
    "decode/decoder.py": [
        (
            "draws-each-epoch",
            'uniform(batch.rng_ids, DRAWS, "sample", self.seed, batch.epoch)',
            'uniform(batch.rng_ids, DRAWS, "sample", self.seed, 0)',
        ),
    ],
    "decode/workers.py": [
        ("messages-in-flight", "while sent - taken < most and", "while sent - taken <= most and"),
        ("order-of-messages", "if taken in answers:", "if answers:"),
    ],
    "decode/worker_processes.py": [
        ("place-of-message", "offset = place * _PLACE_BYTES", "offset = place * 1"),
    ],
    "decode/labels.py": [
        ("largest-float", "if LARGEST < abs(number) < math.inf", "if LARGEST < number < math.inf"),
        (
            "nulls-need-bytes",
            "or not len(column) or column.stored.null_count:",
            "or not len(column):",
        ),
    ],
    # --- augment ---
    "augment/gpu.py": [
        ("flip-half", "draws[:, FLIP_DRAW] < 0.5 if", "draws[:, FLIP_DRAW] > 0.5 if"),
        ("pixel-center", "(inputs + 0.5 - center)", "(inputs - center)"),
        ("last-class", "(label >= self._classes)", "(label > self._classes)"),
        ("random-or-not", "if not self._is_random:", "if self._is_random:"),
    ],
    "augment/mixing.py": [
        ("label-share", "1 - (right - left) * (bottom - top)", "(right - left) * (bottom - top)"),
        ("mixed-with", "np.roll(partners[is_sample], 1)", "np.roll(partners[is_sample], -1)"),
    ],
    # --- loader ---
    "loader/batch_assembly.py": [
        ("bad-of-padding", "if batch.valid[bad.row]:", "if not batch.valid[bad.row]:"),
        ("source-edge", 'ids, side="right") - 1', 'ids, side="left") - 1'),
        ("marked-label", "np.flatnonzero(~own)", "np.flatnonzero(own)"),
        (
            "keys-of-substitutes",
            "keys = self._index.keys(ids)",
            "keys = self._index.keys(batch.ids)",
        ),
        ("all-tensors", 'hasattr(value, "_fields") or _has', 'hasattr(value, "_fields") and _has'),
    ],
    "loader/epoch.py": [
        (
            "bad-of-epoch",
            "Position(self._epoch + 1, 0) if is_last",
            "Position(self._epoch + 1, 0, self._bad) if is_last",
        ),
        (
            "errors-of-epoch",
            "self._bad > self._options.max_errors * self._epoch_samples",
            "self._bad > self._options.max_errors * self._rows",
        ),
        (
            "epoch-kept",
            "if self._requested is None or self._requested.epoch != epoch:",
            "if self._requested is None or self._requested.epoch == epoch:",
        ),
    ],
    "loader/options.py": [
        ("rank-given", "self.is_rank_given or not group", "not self.is_rank_given or not group"),
    ],
    "loader/pipeline.py": [
        ("goes-on", "self._position != (epoch, step)", "self._position == (epoch, step)"),
    ],
    "loader/loader.py": [
        ("state-of-rank", "!= (self.rank, self.world_size):", "!= (self.world_size, self.rank):"),
    ],
    "loader/mixture.py": [
        (
            "weights-in-order",
            "float(weights[name]) for name in indexes",
            "float(weights[name]) for name in weights",
        ),
    ],
    "loader/planning.py": [
        ("data-in-identity", '"data": self.index.fingerprint,', '"data": len(self.index),'),
        (
            "balance-by-class",
            "(len(strata) / len(counts) / counts)[strata]",
            "(len(strata) / len(counts) / counts)[strata - 1]",
        ),
        (
            "weights-of-chosen",
            "values if ids is None else values[ids]",
            "values if ids is None else values[: len(ids)]",
        ),
        (
            "weights-valid",
            "(np.isfinite(values) & (values >= 0))",
            "(np.isfinite(values) | (values >= 0))",
        ),
    ],
    # --- conversion ---
    "webdataset/compat.py": [
        (
            "shuffle-each-epoch",
            'random.Random(f"{self._seed}/{epoch}")',
            'random.Random(f"{self._seed}/0")',
        ),
    ],
    "webdataset/stream.py": [
        ("ranks-first", "worker * world_size + rank", "worker * workers + rank"),
        ("same-pass", "elif record not in numbers:", "else:"),
    ],
    "conversion/shard_plan.py": [
        (
            "shuffled-by-rank",
            'np.argsort(catalog.rank, kind="stable") if options.shuffle',
            'np.argsort(catalog.side, kind="stable") if options.shuffle',
        ),
        ("shard-is-full", 'filled + most, side="right"', 'filled + most, side="left"'),
        (
            "largest-shards-divided",
            "max((total[i] / shards[i], -i)",
            "min((total[i] / shards[i], -i)",
        ),
        ("group-by-error", "int(np.argmin(change))", "int(np.argmax(change))"),
        (
            "by-class",
            "np.lexsort((catalog.side[order], names[",
            "np.lexsort((names[catalog.stratum[order]], names[",
        ),
    ],
    "conversion/listing.py": [
        ("case-of-keys", "folded = hash(wanted.casefold())", "folded = hash(wanted)"),
    ],
    "conversion/collect.py": [
        ("content-of-spool", "else part[1:3]) for", "else part[1:2]) for"),
        ("good-samples-of-limit", "if good == limit:", "if good > limit:"),
    ],
    "conversion/encode.py": [
        ("shorter-side", "self.resize / min(size))", "self.resize / max(size))"),
        ("small-enough", "self._smaller(stored) == stored", "self._smaller(stored) <= stored"),
        ("turned-size", "np.empty((*wanted[::-1],", "np.empty((*wanted,"),
    ],
    "conversion/staging.py": [
        ("old-index-first", "                if replaces:", "                if not replaces:"),
        ("record-last", "key=lambda entry: entry.name == _", "key=lambda entry: entry.name != _"),
        ("new-holds-without-locks", "is_held = is_new", "is_held = True"),
        ("changed-by-another", "not in known and not (rep", "in known and not (rep"),
        (
            "replaced-at-the-end",
            "if self.is_bucket and not self._index and",
            "if self.is_bucket and",
        ),
    ],
    "conversion/changes.py": [
        (
            "class-order",
            "all(before == now for before, now in zip(",
            "all(before <= now for before, now in zip(",
        ),
        ("keys-unique", "if key.casefold() in known]", "if key in known]"),
        ("kinds-of-column", "len(kinds) > 1 and kinds !=", "len(kinds) > 1 and kinds =="),
        (
            "only-named-shards",
            'options.where or "") & allowed',
            'options.where or "") | allowed',
        ),
    ],
    "conversion/sources/table.py": [
        (
            "group-is-column",
            'group=f"{options.group_by}={group}" if group else ""',
            'group=f"{options.group_by}={group}"',
        ),
        (
            "same-spelling",
            "written=self._options.decimal == ",
            "written=self._options.decimal != ",
        ),
    ],
    "conversion/sources/table_files.py": [
        ("changed-table", "if _state(path) != state:", "if _state(path) is None:"),
    ],
    # --- training ---
    "training/models.py": [
        ("no-decay-of-vectors", "if parameter.ndim > 1\n", "if parameter.ndim >= 1\n"),
        (
            "decay-of-layers",
            "(most - layers[name])",
            "(most + 1 - layers[name])",
        ),
        (
            "ema-warms-up",
            "decay = min(self._decay, (1 + step) / (10 + step))",
            "decay = max(self._decay, (1 + step) / (10 + step))",
        ),
    ],
    "training/train.py": [
        ("mean-of-group", "losses.mean() / group)", "losses.mean())"),
        ("seed-of-rank", "state.step, distributed.rank))", "state.step, 0))"),
        (
            "update-of-epoch",
            "update = state.epoch * run.updates",
            "update = state.epoch * run.steps",
        ),
        (
            "unfreeze-epoch",
            "state.epoch >= config.unfreeze_epoch",
            "state.epoch > config.unfreeze_epoch",
        ),
        (
            "validated-weights",
            '"val": (run.scored_model, "validating")',
            '"val": (run.model, "validating")',
        ),
    ],
    "training/metrics.py": [
        (
            "ranks-half",
            "below = without.cumsum(1) - without / 2",
            "below = without.cumsum(1) - without",
        ),
        ("most-certain-first", "ranks.flip(2).unbind(1)", "ranks.flip(1).unbind(1)"),
    ],
    "training/tasks.py": [
        (
            "error-is-minimized",
            '_MINIMIZED = ("loss", "mse", "mae", "ece")',
            '_MINIMIZED = ("loss", "mae", "ece")',
        ),
        (
            "least-improvement",
            "return gain > min_delta or",
            "return gain >= min_delta or",
        ),
        ("patience-resets", "best, waited = value, 0", "best, waited = value, 1"),
        (
            "plateau-patience",
            "waited > 0 and waited % every == 0",
            "waited > 0 and waited % every == 1",
        ),
    ],
    "training/heads.py": [
        ("variance-of-labels", "variance = square - offset**2", "variance = square - offset"),
    ],
    "training/run.py": [
        ("patience-ends", "if 0 < patience <= waited:", "if 0 < patience < waited:"),
        (
            "raw-weights",
            'checkpoint.get("raw", checkpoint["model"])',
            'checkpoint.get("model", checkpoint["model"])',
        ),
        (
            "validation-same",
            'saved["val"], run.val_fingerprint)',
            'saved["val"], saved["val"])',
        ),
        (
            "finite-loss",
            'if not is_sound or (sums["overflowed"]',
            'if not is_sound and (sums["overflowed"]',
        ),
    ],
    "training/checkpoint.py": [
        ("frozen-norms", "if parameters and not any(", "if parameters or not any("),
    ],
    "training/data.py": [
        ("fold-number", "list(folds)[part - 1]", "list(folds)[part - 2]"),
        ("batch-of-processes", "config.batch_size // size,", "config.batch_size,"),
    ],
}


@dataclass(frozen=True)
class Mutant:
    """A fault: `old` becomes `new` in a module, a path below `wdstrain`.

    tests: arguments of pytest that run before those of the package. reason: why it survives.
    """

    name: str
    module: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    reason: str = ""

    @property
    def package(self) -> str:
        return self.module.partition("/")[0]


def _mutant(module: str, name: str, old: str, new: str) -> Mutant:
    full = f"{module.partition('/')[0]}/{name}"
    return Mutant(full, module, old, new, FIRST.get(module, ()), REASONS.get(full, ""))


MUTANTS = [_mutant(module, *change) for module, changes in _CHANGES.items() for change in changes]


def recorded() -> set[str]:
    """Return the names of the mutants that the last recorded runs killed."""
    return set(KILLED_LIST.read_text().split()) if KILLED_LIST.exists() else set()


def write_recorded(names: set[str]) -> None:
    """Write the names of killed mutants; names of mutants that no longer exist are dropped."""
    known = [mutant.name for mutant in MUTANTS]
    KILLED_LIST.write_text("".join(f"{name}\n" for name in sorted(names & set(known))))
