"""Two lists of calls side by side: their module paths matched, and equal calls in order.

Module paths that differ only by the way a container names its parts count as equal. Nothing here
knows a framework.
"""

import re
from collections.abc import Hashable, Iterable, Sequence
from difflib import SequenceMatcher

from polymp.rules.vocabulary import vocabulary


def blocks(
    ones: Sequence[Hashable], others: Sequence[Hashable]
) -> Iterable[tuple[str, int, int, int, int]]:
    """Two lists of keys in parts, as difflib's opcodes: equal ones and what is between these."""
    return SequenceMatcher(None, ones, others, autojunk=False).get_opcodes()


def shared_name(op: str) -> str:
    """The name of an op in both frameworks: products of matrices have one, and convolutions."""
    kind = vocabulary().op(op).kind
    return kind if kind in ("matmul", "convolution") else op


def matched(ours: Iterable[str], theirs: Iterable[str]) -> dict[str, str]:
    """From the other's module paths to ours; a path that has no counterpart stays.

    Equal paths belong together. Of the others, those do that are equal without what containers and
    libraries add; never if two of ours would do.

        blocks.0.attn, Net.blocks.layers.0.attn -> blocks.0.attn
        blocks.0.attn, Net.blocks_0.attn -> blocks.0.attn
    """
    ours, theirs = {*ours}, list(theirs)
    plain: dict[str, list[str]] = {}
    for path in ours - {*theirs}:
        for form in _forms(path):
            plain.setdefault(form, []).append(path)
    names, taken = dict[str, str](), set[str]()
    for path in theirs:
        forms = () if path in ours else _forms(path)
        found = (mine[0] for form in forms if len(mine := plain.get(form, [])) == 1)
        names[path] = next((one for one in found if one not in taken), path)
        taken.add(names[path])
    return names


def _forms(path: str) -> dict[str, None]:
    """The path without parts "layers"; and without a class name in front."""
    # Modules of a list are "blocks_0" in flax linen: they are "blocks.0" here. Equinox adds the
    # class of each of its layers, "up.eqx.nn.Linear": it is left out.
    plain = re.sub(r"\.eqx\.nn\.\w+", "", path)
    parts = re.sub(r"_(\d+)(?=\.|$)", r".\1", plain).split(".")
    starts = (0, 1) if parts[0][:1].isupper() else (0,)
    return {".".join(part for part in parts[at:] if part != "layers"): None for at in starts}
