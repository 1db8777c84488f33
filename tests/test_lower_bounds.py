"""The oldest supported versions of dependencies are the same in pyproject.toml and in the file that CI installs."""

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


def test_the_tested_lower_bounds_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *extras["demo"], *extras["tables"], *extras["hdf5"]]
    required = {}
    for requirement in map(Requirement, texts):
        bounds = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
        assert len(bounds) == 1, f"{requirement} has no lower bound"
        required[canonicalize_name(requirement.name)] = bounds[0]
    lines = (ROOT / "scripts" / "lower-bounds.txt").read_text().splitlines()
    tested = dict(re.fullmatch(r"(\S+)==(\S+)", line).groups() for line in lines if line[0] != "#")  # type: ignore[union-attr]
    assert {canonicalize_name(name): Version(text) for name, text in tested.items()} == required


def test_the_extra_for_ray_is_enough_for_the_example() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "scripts" / "examples" / "ray_train.py").read_text()
    stated = re.search(r"Needs Ray (\S+) or newer", text)
    assert stated is not None
    for extra in ("ray", "dev"):
        (ray,) = (
            requirement
            for requirement in map(Requirement, project["optional-dependencies"][extra])
            if requirement.name == "ray"
        )
        assert {part.version for part in ray.specifier} == {stated[1]}
