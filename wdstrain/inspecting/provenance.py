"""How a set was made, in plain words, from what its index says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_USUAL = {
    "seed": 0,
    "shuffle": True,
    "check": "magic",
    "shard_bytes": 256_000_000,
    "on_bad": "raise",
}  # is not worth a word


def made(info: Mapping[str, Any]) -> str:
    """Sentences about the source, the options that were not the usual ones, and what was passed over."""
    source, options = _mapping(info.get("source")), _mapping(info.get("options"))
    if not source:
        return "by another program: no index says how"
    parts = [_from(source)]
    changed = {
        name: value
        for name, value in options.items()
        if value not in (None, False) and _USUAL.get(name) != value
    }
    said = [_option(name, value) for name, value in changed.items()]
    if options.get("shuffle") is False:
        said.append("not shuffled")
    parts += [f"with {', '.join(said)}"] if said else []
    if isinstance(info.get("listed"), int):
        less = [f"{info[name]} {name}" for name in ("quarantined", "renamed") if info.get(name)]
        parts.append(", ".join([f"{info['listed']} listed", *less]))
    if info.get("made") == "walked over headers":
        parts.append("the index made anew from the headers")
    return "; ".join(parts)


def ignored(info: Mapping[str, Any]) -> dict[str, int]:
    """What was passed over, by reason."""
    return {
        str(reason): count
        for reason, count in _mapping(info.get("ignored")).items()
        if isinstance(count, int)
    }


def _from(source: Mapping[str, Any]) -> str:
    kind = source.get("kind")
    if kind == "folder":
        return (
            f"from a folder of {source.get('classes')} class{'es' * (source.get('classes') != 1)}"
        )
    if kind == "table":
        labels = ", ".join(map(str, source.get("labels") or [])) or "none"
        return f"from a table, pictures in column {source.get('image')}, labels: {labels}"
    if kind == "hdf5":
        return f"from an HDF5 file: {', '.join(f'{name} = {path}' for name, path in _mapping(source.get('fields')).items())}"
    if kind == "torchvision":
        return f"from torchvision's {source.get('name')} ({', '.join(map(str, source.get('splits') or []))})"
    if kind == "tars":
        chosen = [f"where {source['select']}"] * bool(source.get("select")) + [
            "of some keys"
        ] * bool(source.get("keys"))
        names = _mapping(source.get("fields")).items()
        chosen += [f"{old} called {new}" for old, new in names if old != new]
        return ", ".join(["from other tars", *chosen])
    return {"arrays": "from arrays", "samples": "from samples of a program"}.get(
        str(kind), f"from {kind}"
    )


def _option(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        value = ",".join(f"{key}={share}" for key, share in value.items())
    words = name.replace("_", " ")
    return words if value is True else f"{words} {value}"


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
