"""The oldest supported versions of dependencies are equal in pyproject.toml and in CI's file."""

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


def test_ci_tests_the_lower_bounds_of_the_project() -> None:
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


def test_the_ray_extra_satisfies_the_example() -> None:
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
