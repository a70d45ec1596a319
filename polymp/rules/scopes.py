"""Scopes: patterns over the names of the modules that an op is called in.

A path is the names of the modules from the outermost inwards, joined by dots: "blocks.0.attn". A
pattern is a glob: `*` stands for any characters, dots among them, `?` for one, `[ab]` for one of
several. A `*.` in front matches an empty path too: "*.lm_head" is the head of the outermost model
and of one that is a part of another. A pattern that matches a module holds for everything inside
it. Nothing here knows what a module is.
"""

import difflib
import fnmatch
import re
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache

from polymp.errors import PolicyError

_SET = re.compile(r"\[(?!!\])[^]]+\]")  # of characters; an empty one is none


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("*."):
        return re.compile(r"(?:.*\.)?" + fnmatch.translate(pattern[2:]), re.DOTALL)
    return re.compile(fnmatch.translate(pattern))


def depth(pattern: str, path: str) -> int:
    """Return the depth of the module on `path` that a pattern matches; 0 if it matches none."""
    # Of several, the innermost; for a pattern that ends in `*`, which matches whatever lies inside
    # the module too, the outermost. The outermost module of all, whose path is empty, has depth 1.
    names = path.split(".") if path else []
    ends = range(len(names) + 1) if pattern.endswith("*") else range(len(names), -1, -1)
    match = _compiled(pattern).match
    for end in ends:
        if match(".".join(names[:end])):
            return end + 1
    return 0


def ranked(patterns: Iterable[str], path: str) -> tuple[tuple[tuple[int, int], str], ...]:
    """The patterns that match, the weakest first, each with its rank."""
    # A pattern outranks another if it matches a module further in; on one module, if it has more
    # characters that stand for themselves.
    found = []
    for pattern in patterns:
        if at := depth(pattern, path):
            plain = _SET.sub("?", pattern)
            found.append(((at, sum(c not in "*?" for c in plain)), pattern))
    return tuple(sorted(found))


def nearest(pattern: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Return patterns that match modules, and are spelled almost like one that matches none."""
    front = "*." if pattern.startswith("*.") else ""
    asked = pattern.removeprefix(front)
    names = asked.count(".") + 1
    ends = {".".join(path.split(".")[-names:]) if front else path for path in paths}
    close = difflib.get_close_matches(asked, sorted(ends - {""}), n=3)
    return tuple(front + end for end in close)


def hint(pattern: str, paths: Iterable[str], none: str) -> str:
    """Say which module paths a pattern that matches none may mean; if none is near, which exist."""
    names = [path.split(".") for path in paths if path]
    known = {".".join(parts[:end]) for parts in names for end in range(1, len(parts) + 1)}
    if close := nearest(pattern, known):
        return f"did you mean {' or '.join(map(repr, close))}?"
    first = sorted(known, key=lambda path: (path.count("."), path))[:3]
    return f"paths are, for example, {', '.join(map(repr, first))}." if first else none


def matching(
    pattern: str, paths: Collection[str], where: str, what: str, hint: Callable[[str], str]
) -> set[str]:
    """The paths that a pattern matches; it has to match one."""
    check(pattern, where)
    found = {path for path in paths if depth(pattern, path)}
    if not found:
        raise PolicyError(f"{where}: {pattern!r} matches no {what}: {hint(pattern)}")
    return found


def check(pattern: str, where: str) -> None:
    """Refuse a pattern that can match no path."""
    names = pattern.split(".") if isinstance(pattern, str) else [""]
    if not all(names) or "/" in pattern or "[" in _SET.sub("", pattern):
        raise PolicyError(
            f"{where}: {pattern!r} is no pattern of module paths. Write names joined by dots, "
            'such as "*.lm_head" or "blocks.*.attn"; * stands for any characters.'
        )
