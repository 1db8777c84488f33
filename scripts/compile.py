"""Compile `wdstrain/native/kernels.c`; hatchling does so when it builds or installs the package.

Without a C compiler the package is installed all the same, and does the same work slower. The
library is plain C for ctypes: it needs no Python headers and fits every Python version. It contains
the hash of its source, so that a library older than the source is not used.

    python scripts/compile.py        compile it in a clone
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from hashlib import blake2b
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    BuildHookInterface = object  # type: ignore[assignment,misc,unused-ignore]

NATIVE = Path(__file__).resolve().parent.parent / "wdstrain" / "native"


def compile_library(
    source: Path = NATIVE / "kernels.c", library: Path = NATIVE / "libkernels.so"
) -> str:
    """Compile the source to the library. Returns an empty string, or why it failed.

    An existing library is removed, also if the compilation fails.
    """
    source_hash = int.from_bytes(blake2b(source.read_bytes(), digest_size=8).digest(), "little")
    flags = ["-O2", "-shared", "-fPIC", f"-DSOURCE={source_hash}ULL"]
    library.unlink(missing_ok=True)
    # renamed at the end: another process must never load a part of the library
    temporary = library.with_name(f".{library.name}.{os.getpid()}")
    reason = "no C compiler was found"
    for compiler in [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]:
        try:
            command = [*shlex.split(compiler), *flags, "-o", str(temporary), str(source)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            os.replace(temporary, library)
            return ""
        except subprocess.CalledProcessError as error:
            reason = (
                f"{compiler} failed: {(error.stderr.strip().splitlines() or ['no message'])[-1]}"
            )
        except (OSError, subprocess.TimeoutExpired, ValueError):
            continue
        finally:
            temporary.unlink(missing_ok=True)
    return reason


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg,misc,unused-ignore]
    """Hook that hatchling calls before it builds a wheel or an editable installation."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if reason := compile_library():
            self.app.display_warning(
                f"wdstrain is installed without its C library and reads small samples slower: {reason}. "
                f"Install a C compiler and reinstall wdstrain."
            )
            return
        build_data["artifacts"].append("wdstrain/native/libkernels.so")
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(
            ".", "_"
        )


if __name__ == "__main__":
    sys.exit(compile_library() or None)
