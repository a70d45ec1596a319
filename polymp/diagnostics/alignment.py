"""Two lists of calls side by side: their module paths matched, and equal calls in order.

Module paths that differ only by the way a container names its parts count as equal. Nothing here
knows a framework.
"""

import re
from collections.abc import Hashable, Iterable, Sequence
from difflib import SequenceMatcher
from itertools import combinations

from polymp.rules.vocabulary import vocabulary

_LAYERS = 4  # parts "layers" of one path that are left out in every combination


def blocks(
    ones: Sequence[Hashable], others: Sequence[Hashable]
) -> Iterable[tuple[str, int, int, int, int]]:
    """Two lists of keys in parts, as difflib's opcodes: equal ones and what is between these."""
    return SequenceMatcher(None, ones, others, autojunk=False).get_opcodes()


def aligned(ones: Sequence[Hashable], others: Sequence[Hashable]) -> dict[int, int]:
    """From places in one list of keys to the places of equal keys in another, both in order."""
    equal = (part[1:] for part in blocks(ones, others) if part[0] == "equal")
    return {i: k + i - start for start, end, k, _ in equal for i in range(start, end)}


def shared_name(op: str) -> str:
    """The name of an op in both frameworks: products of matrices have one, and convolutions."""
    kind = vocabulary().kind_of(op)
    return kind if kind in ("matmul", "convolution") else op


def matched(ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    """From the other's module paths to ours; a path that has no counterpart stays.

    Equal paths belong together. Of the others, those do that become equal when parts "layers" or a
    class name in front are left out on either side, the fewest parts first; never if two of ours
    would do.

        blocks.0.attn, Net.blocks.layers.0.attn -> blocks.0.attn
        blocks.0.attn, Net.blocks_0.attn -> blocks.0.attn
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
    """The path, and what is left without parts "layers" and a class name in front.

    Modules of a list are "blocks_0" in flax linen: they are "blocks.0" here. Equinox adds the class
    of each of its layers, "up.eqx.nn.Linear", and torch.compile "_orig_mod": they are left out.
    """
    plain = re.sub(r"\.eqx\.nn\.\w+|\._orig_mod\b|^_orig_mod\.", "", path)
    parts = re.sub(r"_(\d+)(?=\.|$)", r".\1", plain).split(".")
    layers = [at for at, part in enumerate(parts) if part == "layers"][:_LAYERS]
    starts = [0, 1] if parts[0][:1].isupper() else [0]
    forms = {
        ".".join(part for at, part in enumerate(parts) if at >= start and at not in left_out): None
        for count in range(len(layers) + 1)
        for left_out in combinations(layers, count)
        for start in starts
    }
    return list(dict.fromkeys((path, *sorted(forms, key=lambda form: -form.count(".")))))
