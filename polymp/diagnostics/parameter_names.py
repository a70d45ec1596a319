"""Names of gradients as those of modules: `layers.0.attn.kernel`, however a program returns them.

    "[0][1]['layers'][0]['attn']['kernel'].value"   of a result of value_and_grad
    "params['layers'][0]['attn']['kernel']"         of an argument
    "[1][0].mu['layers'][0]['attn']['kernel']"      of Adam's state, which the same gradient went to

    expressions, modules that ran -> one name for each parameter

Nothing here knows a framework.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

_TOKEN = re.compile(
    r"""\[(?:'(?P<key>(?:[^'\\]|\\.)*)'|"(?P<other>[^"]*)"|(?P<at>[^\]]*))\]|\.?(?P<name>[^.\[\]]+)"""
)


def short(found: Mapping[int, Sequence[str]], modules: Iterable[str]) -> dict[int, list[str]]:
    """Return short names for expressions.

    A name begins where it, but for its last part, is the path of a module that ran. If no part of
    an expression is one, the argument and the places in tuples are left out. Where two would have
    one name, both keep more of what stands in front.
    """
    known = _known(modules)
    made: dict[tuple[int, str], Sequence[str]] = {}
    for value, expressions in found.items():
        options = {text: _options(text, known) for text in dict.fromkeys(expressions)}
        for text, names in options.items():
            others = (other[0] for key, other in options.items() if key != text)
            if not any(_ends(names[0], other) for other in others):
                made[value, names[0]] = names
    chosen = _apart(made)
    return {value: [chosen[key] for key in made if key[0] == value] for value in found}


def _known(modules: Iterable[str]) -> dict[str, str]:
    """The paths of modules and of those around them; without a class in front, as linen has it."""
    known: dict[str, str] = {}
    for module in modules:
        parts = module.split(".") if module else []
        for end in range(1, len(parts) + 1):
            known[".".join(parts[:end])] = ".".join(parts[:end])
            if parts[0][:1].isupper() and end > 1:
                known.setdefault(".".join(parts[1:end]), ".".join(parts[:end]))
    return known


def _options(text: str, known: Mapping[str, str]) -> list[str]:
    """Names for an expression, the shortest first."""
    parts = [part for match in _TOKEN.finditer(text) for part in _parts(match)]
    starts = range(len(parts) - 1)
    owned = (at for at in starts if ".".join(parts[at:-1]) in known)
    plain = next((at for at in range(len(parts)) if not parts[at].isdigit()), 0)
    if plain == 0 and text[:1] not in "[." and len(parts) > 1:  # an argument, by its name
        plain = next((at for at in range(1, len(parts)) if not parts[at].isdigit()), 0)
    first = next(owned, None)
    names = [] if first is None else [f"{known['.'.join(parts[first:-1])]}.{parts[-1]}"]
    start = plain if first is None else first - 1
    if start == 0 and all(part.isdigit() for part in parts):
        return [text]
    return [*names, *(".".join(parts[at:]) for at in range(start, -1, -1)), text]


def _parts(match: re.Match[str]) -> list[str]:
    """The parts of a path in one step of an expression; haiku's names of modules have several."""
    key = match["key"] or match["other"] or match["at"] or match["name"] or ""
    if match["name"] == "value":  # of flax's variables
        return []
    return [part for part in key.split("/") if part not in ("", "~")]


def _ends(name: str, other: str) -> bool:
    """True if a name is another one with more in front of it."""
    return name.endswith(f".{other}")


def _apart(made: Mapping[tuple[int, str], Sequence[str]]) -> dict[tuple[int, str], str]:
    """One of its names for each, no two alike."""
    length = dict.fromkeys(made, 0)
    while True:
        chosen = {key: names[min(length[key], len(names) - 1)] for key, names in made.items()}
        by_name: dict[str, list[tuple[int, str]]] = {}
        for key, name in chosen.items():
            by_name.setdefault(name, []).append(key)
        alike = [key for keys in by_name.values() if len(keys) > 1 for key in keys]
        longer = [key for key in alike if length[key] < len(made[key]) - 1]
        if not longer:
            return chosen
        for key in longer:
            length[key] += 1
