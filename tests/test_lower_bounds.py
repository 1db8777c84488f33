"""The oldest supported versions of dependencies, and the pinned ones, fit pyproject.toml."""

from __future__ import annotations

import re
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.conftest import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_ci_tests_the_lower_bounds_of_the_project() -> None:
    texts = [*PROJECT["dependencies"], *EXTRAS["demo"], *EXTRAS["tables"], *EXTRAS["hdf5"]]
    required = {}
    for requirement in map(Requirement, texts):
        bounds = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
        assert len(bounds) == 1, f"{requirement} has no lower bound"
        required[canonicalize_name(requirement.name)] = bounds[0]
    lines = (ROOT / "scripts" / "lower-bounds.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if line[0] != "#")
    assert {canonicalize_name(name): Version(text) for name, text in tested.items()} == required


def test_every_dependency_of_the_tests_is_pinned_to_a_version_that_fits() -> None:
    """scripts/setup.sh installs the pinned versions, for the Python that runs it."""
    lines = (ROOT / "scripts" / "requirements.lock").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all(str(pin.specifier).startswith("==") for pin in pinned)
    chosen = {"archives", "demo", "docs", "tables", "hdf5", "s3", "test", "dev"}
    texts = PROJECT["dependencies"] + [text for name in chosen for text in EXTRAS[name]]
    for version in ("3.10", "3.11", "3.12", "3.13", "3.14"):
        python = {"python_version": version, "python_full_version": f"{version}.5"}
        versions = {
            canonicalize_name(pin.name): str(pin.specifier).removeprefix("==")
            for pin in pinned
            if pin.marker is None or pin.marker.evaluate(python)
        }
        for requirement in map(Requirement, texts):
            if requirement.name == "wdstrain":
                assert requirement.extras <= chosen
            elif requirement.marker is None or requirement.marker.evaluate(python):
                name = canonicalize_name(requirement.name)
                assert requirement.specifier.contains(versions[name]), f"{requirement} {version}"


def test_the_ray_extra_satisfies_the_example() -> None:
    text = (ROOT / "scripts" / "examples" / "ray_train.py").read_text()
    stated = re.search(r"Needs Ray (\S+) or newer", text)
    assert stated is not None
    for extra in ("ray", "test"):
        (ray,) = (
            requirement
            for requirement in map(Requirement, EXTRAS[extra])
            if requirement.name == "ray"
        )
        assert {part.version for part in ray.specifier} == {stated[1]}
