"""Run one target under atheris in a process of its own, because libFuzzer never returns.

    python -m tests.fuzz.fuzzer_process TARGET CORPUS FINDS SEED [arguments of libFuzzer]

`python -m tests.fuzz` starts it. Only wdstrain is instrumented. An exception does not end the run:
its input is written to FINDS, once for each place that raises. A crash, 10 s on one input or more
than 2 GiB end the run; libFuzzer then writes the input.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import resource
import sys
import traceback
from random import Random

import atheris
import torch  # noqa: F401  its import is too slow for the time limit of the first image

with atheris.instrument_imports(include=["wdstrain"], enable_loader_override=False):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name, corpus, finds, seed, *words = sys.argv[1:]
    target, known = TARGETS[name], set[str]()
    logging.disable()

    def run(data: bytes) -> None:
        try:
            target.run(data)
        except Exception as error:
            kind = kind_of(error)
            if kind not in known:
                known.add(kind)
                with open(os.path.join(finds, f"{name}-{kind}"), "wb") as file:
                    file.write(data)
                print(f"FIND {kind}: {str(error)[:300]}", file=sys.stderr, flush=True)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        random = Random(number)
        if target.mutate is not None and random.random() < 0.5:
            changed = target.mutate(data, random)
            if len(changed) <= most:
                return changed
        return bytes(atheris.Mutate(data, most))

    # libFuzzer reads the peak memory of the process, which includes that of its parent.
    inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    flags = [f"-seed={seed}", f"-max_len={target.longest}", f"-rss_limit_mb={2048 + inherited}"]
    flags += ["-timeout=10", "-print_final_stats=1", "-close_fd_mask=1"]
    if target.words:
        dictionary = corpus.rstrip("/") + ".dict"
        with open(dictionary, "w") as file:
            for word in (word for word in target.words if len(word) <= 64):
                file.write('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n')
        flags.append(f"-dict={dictionary}")
    options = {} if target.mutate is None else {"custom_mutator": mutate}
    flags += [f"-artifact_prefix={finds}/{name}-", *words, corpus]
    atheris.Setup([sys.argv[0], *flags], run, **options)
    atheris.Fuzz()


def kind_of(error: BaseException) -> str:
    """Return the kind and place of an error: the last line of the package, or the broken
    promise.
    """
    place = str(error).partition(":")[0]
    for item in traceback.extract_tb(error.__traceback__):
        if "wdstrain" in item.filename and f"{os.sep}fuzz{os.sep}" not in item.filename:
            place = f"{os.path.basename(item.filename)}-{item.name}"
    text = re.sub(r"[^A-Za-z0-9]+", "-", f"{type(error).__name__} {place}").strip("-")
    return f"{text[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


if __name__ == "__main__":
    main()
