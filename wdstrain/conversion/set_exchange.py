"""Replacement of one set of shards by another in the same folder.

The new files lie in `.swapping` while they are exchanged for the old ones. Readers refuse the
folder as long as it exists. An exchange that was killed is completed from any point.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress

from wdstrain.errors import WdstrainError
from wdstrain.shards.index_document import read_document
from wdstrain.shards.index_io import TABLE_NAME
from wdstrain.storage.addresses import INDEX_NAME, SWAPPING
from wdstrain.storage.files import sync_folder, write_whole

SKIPPED_NAME = "skipped.jsonl"  # samples that were skipped, with reasons
RENAMED_NAME = "renamed.jsonl"  # samples whose key is not their name in the source

# Names in the staging directory:
EXCHANGE_NAME = "names.json"  # names that the exchange removes and brings
DONE_NAME = "done"  # left over after an exchange or update was completed


class SetExchange:
    """The exchange of the set in the folder `out` for one in its staging directory."""

    def __init__(self, out: str, staging: str) -> None:
        self._out, self._staging = out, staging
        self._swapping = os.path.join(out, SWAPPING)

    @property
    def is_begun(self) -> bool:
        """Whether an exchange was begun and is not completed."""
        return os.path.exists(self._swapping)

    def names(self) -> list[str]:
        """Return the names that interrupted exchanges were about to remove or bring."""
        collected: list[str] = []
        for place in (self._swapping, os.path.join(self._staging, "shards"), self._staging):
            with (
                suppress(OSError, ValueError, KeyError),
                open(os.path.join(place, EXCHANGE_NAME), encoding="utf-8") as file,
            ):
                names = json.load(file)
                collected += [*names["former"], *names["files"]]
        return list(dict.fromkeys(collected))

    def remember_names(self) -> None:
        """Keep the names of interrupted exchanges in the staging directory."""
        if names := self.names():
            self._record(self._staging, names, {})

    def begin(self, shards: str, files: dict[str, str]) -> None:
        """Decide to put files in `shards`, {final name: name there}, in place of the set.

        Raises OSError.
        """
        former, listed = list[str](), os.path.join(self._out, INDEX_NAME)
        with suppress(WdstrainError):
            if os.path.exists(listed):
                former += [shard.name for shard in read_document(listed).shards]
        self._record(shards, [*former, *self.names()], files)
        if self.is_begun:  # interrupted; no index is there until the new one is put
            before = os.path.join(self._staging, "former")
            shutil.rmtree(before, ignore_errors=True)
            os.rename(self._swapping, before)
        os.rename(shards, self._swapping)
        sync_folder(self._out)

    def complete(self) -> None:
        """Complete an exchange from any point at which it was interrupted. Raises OSError."""
        out, swapping = self._out, self._swapping
        with open(os.path.join(swapping, EXCHANGE_NAME), encoding="utf-8") as file:
            names = json.load(file)
        files: dict[str, str] = names["files"]
        arrived = {
            final
            for final, name in files.items()
            if not os.path.exists(os.path.join(swapping, name))
        }
        if INDEX_NAME not in arrived:
            # The old index goes first, so no old shard is ever read under the new index.
            for name in [INDEX_NAME, SKIPPED_NAME, RENAMED_NAME, *names["former"], TABLE_NAME]:
                if os.path.basename(name) not in arrived:
                    with suppress(FileNotFoundError):
                        os.unlink(os.path.join(out, os.path.basename(name)))
            for final, name in files.items():
                if final == INDEX_NAME:
                    sync_folder(out)  # after a power loss, the index implies all other files
                if final not in arrived:
                    os.replace(os.path.join(swapping, name), os.path.join(out, final))
            sync_folder(out)
        # Readers take the new set from here on.
        os.rename(swapping, os.path.join(self._staging, DONE_NAME))
        sync_folder(out)

    def _record(self, folder: str, former: list[str], files: dict[str, str]) -> None:
        data = json.dumps({"former": former, "files": files}).encode()
        write_whole(os.path.join(folder, EXCHANGE_NAME), data)
