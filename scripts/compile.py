"""Compiles `wdstrain/native/kernels.c` when the package is installed or built, where there is a C compiler; hatchling calls it.

Without one, or where the compiler fails, the package is installed all the same and does the same things piece by piece, slower.
The library is plain C that is loaded by ctypes: it needs no headers of Python, and one fits all versions of it. It carries the hash of
its source, so that one that is older than the source is not used.

    python scripts/compile.py        compiles it in a clone
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


def compiled(source: Path = NATIVE / "kernels.c", library: Path = NATIVE / "libkernels.so") -> str:
    """Compile the source to the library. Why it could not be, or nothing; a library that was there before is then gone."""
    number = int.from_bytes(blake2b(source.read_bytes(), digest_size=8).digest(), "little")
    flags = ["-O2", "-shared", "-fPIC", "-pthread", f"-DSOURCE={number}ULL"]
    library.unlink(missing_ok=True)
    temporary = library.with_name(f".{library.name}.{os.getpid()}")  # whole or not there, also beside another that installs
    why = "no C compiler was found"
    for compiler in [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]:
        try:
            command = [*shlex.split(compiler), *flags, "-o", str(temporary), str(source)]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            os.replace(temporary, library)
            return ""
        except subprocess.CalledProcessError as error:
            why = f"{compiler} failed: {(error.stderr.strip().splitlines() or ['it said nothing'])[-1]}"
        except (OSError, subprocess.TimeoutExpired, ValueError):
            continue
        finally:
            temporary.unlink(missing_ok=True)
    return why


class CustomBuildHook(BuildHookInterface):  # type: ignore[type-arg,misc,unused-ignore]
    """What hatchling calls before it makes a wheel, or an installation that is the clone itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if why := compiled():
            self.app.display_warning(f"wdstrain is installed without its compiled part, and reads small samples slower: {why}")
            return
        build_data["artifacts"].append("wdstrain/native/libkernels.so")
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")


if __name__ == "__main__":
    sys.exit(compiled() or None)
