"""The mutants: one-token faults in code that decides about data, and the tests that should see them.

`mutants.txt` has a mutant per line: module || name || old text || new text; ⏎ is a line break. The
old text occurs exactly once in the module. No mutant is equivalent to the package as it is: each
changes a value, an order or a refusal that somebody can see. A module that is rebuilt gets new
mutants of the same kinds: comparisons, limits, signs, dropped checks, dropped words of a key, wrong
axes and wrong variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KILLED_LIST = Path(__file__).parent / "killed.txt"

PACKAGES = (
    *("order", "shards", "storage", "reader", "decode", "augment", "loader", "webdataset"),
    *("conversion", "training"),
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
        "tests/training/test_results.py",
        "tests/training/test_data.py",
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
    "shards/declare.py": ("tests/inspection/test_changed_index.py",),
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
        "tests/loader/test_positions.py",
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
        "tests/training/test_scores.py",
    ),
    "training/metrics.py": (
        "tests/training/test_scores.py::test_precision_calibration_and_own_metrics_are_those_of_several_labels",
        "tests/training/test_scores.py",
    ),
    "training/tasks.py": (
        "tests/training/test_scores.py::test_the_metric_of_a_label_chooses_the_best_epoch",
        "tests/training/test_scores.py::test_a_plateau_lowers_the_rate",
        "tests/training/test_scores.py",
    ),
    "training/train.py": (
        "tests/training/test_torchrun.py::test_processes_share_a_batch_and_draw_other_random_numbers",
    ),
    "training/data.py": (
        "tests/training/test_data.py",
        "tests/training/test_torchrun.py::test_processes_share_a_batch_and_draw_other_random_numbers",
    ),
    "training/run.py": (
        "tests/training/test_scores.py::test_improvements_below_min_delta_count_for_the_best_epoch_and_not_for_patience",
        "tests/training/test_resuming.py",
    ),
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


def listed() -> list[Mutant]:
    """Return the mutants of `mutants.txt`."""
    mutants = []
    for line in Path(__file__).with_name("mutants.txt").read_text(encoding="utf-8").splitlines():
        module, name, old, new = line.replace("⏎", "\n").split(" || ")
        full = f"{module.partition('/')[0]}/{name}"
        tests, reason = FIRST.get(module, ()), REASONS.get(full, "")
        mutants.append(Mutant(full, module, old, new, tests, reason))
    return mutants


MUTANTS = listed()


def recorded() -> set[str]:
    """Return the names of the mutants that the last recorded runs killed."""
    return set(KILLED_LIST.read_text().split()) if KILLED_LIST.exists() else set()


def write_recorded(names: set[str]) -> None:
    """Write the names of killed mutants; names of mutants that no longer exist are dropped."""
    known = [mutant.name for mutant in MUTANTS]
    KILLED_LIST.write_text("".join(f"{name}\n" for name in sorted(names & set(known))))
