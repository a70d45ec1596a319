"""The modules of one model matched with those of another whose containers name them differently."""

from collections.abc import Iterable
from itertools import combinations

_LAYERS = 4  # parts "layers" of one path that are left out in every combination


def matched(ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    """From the other's module paths to ours; a path that has no counterpart stays.

    Equal paths belong together. Of the others, those do that become equal when parts "layers" or a
    class name in front are left out on either side, the fewest parts first; never if two of ours
    would do.

        blocks.0.attn, Net.blocks.layers.0.attn -> blocks.0.attn
    """
    theirs = list(theirs)
    free = {*ours} - {*theirs}
    reduced: dict[str, list[str]] = {}
    for path in sorted(free):
        for form in _forms(path):
            reduced.setdefault(form, []).append(path)
    names, taken = dict[str, str](), set[str]()
    for path in theirs:
        found = [reduced.get(form, []) for form in _forms(path)] if path not in {*ours} else []
        unique = [paths[0] for paths in found if len(paths) == 1 and paths[0] not in taken]
        names[path] = unique[0] if unique else path
        taken.add(names[path])
    return names


def _forms(path: str) -> list[str]:
    """The path, and what is left without parts "layers" and a class name in front."""
    parts = path.split(".")
    layers = [at for at, part in enumerate(parts) if part == "layers"][:_LAYERS]
    starts = [0, 1] if parts[0][:1].isupper() else [0]
    forms = {
        ".".join(part for at, part in enumerate(parts) if at >= start and at not in left_out): None
        for count in range(len(layers) + 1)
        for left_out in combinations(layers, count)
        for start in starts
    }
    return sorted(forms, key=lambda form: -form.count("."))
