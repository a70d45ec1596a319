"""Scopes against a matcher that tries every way: what matches, how deep, and who outranks whom."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from polymp.errors import PolicyError
from polymp.rules import scopes

# A pattern as parts: what one of them stands for, by how it is written.
ONE = {"?": "abc0.", "[ab]": "ab", "[!a]": "b0.", "[0-1]": "0"}
PARTS = st.lists(st.sampled_from(["a", "b", "0", ".", "*", *ONE]), min_size=1, max_size=7)
PATHS = st.lists(st.text("ab0", min_size=1, max_size=2), max_size=4).map(".".join)


def fits(parts: Sequence[str], text: str, *, nothing: bool = True, dots: bool = True) -> bool:
    """True if the parts, in order, can stand for the whole text.

    Args:
        parts: of the pattern.
        text: the path of a module.
        nothing: False for a matcher in which "*." in front never stands for nothing.
        dots: False for a matcher in which a star stops at a dot.
    """
    if list(parts[:2]) == ["*", "."] and nothing:
        tails = [text, *(text[at + 1 :] for at, c in enumerate(text) if c == ".")]
        return any(spelled(parts[2:], tail, dots) for tail in tails)
    return spelled(parts, text, dots)


def spelled(parts: Sequence[str], text: str, dots: bool) -> bool:
    if not parts:
        return not text
    if parts[0] == "*":
        ends = [at for at in range(len(text) + 1) if dots or "." not in text[:at]]
        return any(spelled(parts[1:], text[at:], dots) for at in ends)
    first = ONE.get(parts[0], parts[0])
    return bool(text) and text[0] in first and spelled(parts[1:], text[1:], dots)


def deepest(
    parts: Sequence[str],
    path: str,
    *,
    pick: Callable[..., int] = max,
    at_the_end: Callable[..., int] = min,
    **matcher: bool,
) -> int:
    """How many modules, the outermost one with it, lead to the innermost one that fits; 0: none.

    With a star at the end, to the outermost one.
    """
    names = path.split(".") if path else []
    pick = at_the_end if parts and parts[-1] == "*" else pick
    modules = [".".join(names[:end]) for end in range(len(names) + 1)]
    return pick((at + 1 for at, m in enumerate(modules) if fits(parts, m, **matcher)), default=0)


@settings(max_examples=1000)
@given(PARTS, PATHS)
def test_depth_is_what_trying_every_way_finds(parts, path):
    assert scopes.depth("".join(parts), path) == deepest(parts, path)


@settings(max_examples=500)
@given(st.lists(PARTS, max_size=5, unique_by="".join), PATHS)
def test_the_strongest_pattern_is_the_deepest_then_the_one_with_most_plain_characters(many, path):
    by_text = {"".join(parts): parts for parts in many}
    expected = {
        pattern: (depth, sum(part != "*" and part not in ONE for part in parts))
        for pattern, parts in by_text.items()
        if (depth := deepest(parts, path))
    }
    found = scopes.ranked(by_text, path)
    assert {pattern: rank for rank, pattern in found} == expected
    assert [rank for rank, _ in found] == sorted(expected.values()), "the weakest come first"


WRONG = {
    "a star stops at a dot": {"dots": False},
    "a star and a dot never stand for nothing": {"nothing": False},
    "the outermost module that fits counts": {"pick": min},
    "the innermost one counts with a star at the end, too": {"at_the_end": max},
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_matcher_is_noticed(fault):
    def differ(case):
        return scopes.depth("".join(case[0]), case[1]) != deepest(*case, **WRONG[fault])

    quick = settings(max_examples=10000, phases=[Phase.generate])  # one, not the smallest
    assert find(st.tuples(PARTS, PATHS), differ, settings=quick)


@pytest.mark.parametrize(
    ("pattern", "path", "depth"),
    [
        ("*", "", 1),
        ("*", "blocks.0", 1),  # a star at the end holds for what lies in the outermost match
        ("blocks.*", "blocks.0.attn", 3),
        ("*.lm_head", "lm_head", 2),
        ("*.lm_head", "model.lm_head", 3),
        ("*.lm_head", "model.lm_head.proj", 3),  # what is inside it, too
        ("*.lm_head", "model.my_lm_head", 0),
        ("*lm_head", "model.my_lm_head", 3),
        ("lm_head", "model.lm_head", 0),
        ("blocks.*.attn", "blocks.0.attn.q", 4),
        ("blocks.*.attn", "blocks.0.inner.attn", 5),  # a star runs over dots
        ("blocks.*.attn", "blocks.attn", 0),  # only in front does "*." stand for nothing
        ("*.attn", "attn.mlp.attn.mlp", 4),  # the innermost one counts
        ("blocks.?.attn", "blocks.1.attn", 4),
        ("blocks.?.attn", "blocks.11.attn", 0),
        ("blocks.[12].attn", "blocks.2.attn", 4),
        ("blocks.[!12].attn", "blocks.2.attn", 0),
        ("Attn", "attn", 0),
        ("a+b", "aab", 0),  # no regular expression
    ],
)
def test_depth(pattern, path, depth):
    assert scopes.depth(pattern, path) == depth


@pytest.mark.parametrize(
    ("path", "weaker", "stronger"),
    [
        ("blocks.0", "blocks.*", "blocks.0"),
        ("blocks.0.attn", "blocks.*", "blocks.0"),
        ("lm_head.proj", "*", "lm_head"),
        ("blocks.0.attn", "blocks.0", "*.attn"),  # further in, though shorter
        ("blocks.0.attn", "*.attn", "blocks.*.attn"),
        ("blocks.0.attn", "blocks.?.attn", "blocks.0.attn"),
        ("blocks.0.attn", "blocks.[01].attn", "blocks.0.attn"),
        ("blocks.0.attn", "blocks.[0123456789].attn", "blocks.0.attn"),
        ("blocks.0.attn", "blocks.[!123456789].attn", "blocks.0.attn"),
    ],
)
def test_the_more_exact_pattern_outranks(path, weaker, stronger):
    (low, first), (high, second) = scopes.ranked([stronger, weaker], path)
    assert (first, second) == (weaker, stronger)
    assert low < high


def test_patterns_that_say_as_much_have_one_rank():
    (one, _), (two, _) = scopes.ranked(["blocks.?.attn", "blocks.*.attn"], "blocks.0.attn")
    assert one == two
    assert scopes.ranked(["mlp", "*.mlp"], "blocks.0.attn") == ()


@pytest.mark.parametrize("pattern", ["", "model/lm_head", ".lm_head", "lm_head.", "*.", "."])
def test_a_pattern_of_no_module_is_refused(pattern):
    with pytest.raises(PolicyError) as error:
        scopes.check(pattern, "own.toml")
    assert str(error.value) == (
        f"own.toml: {pattern!r} is no pattern of module paths. Write names joined by dots, such as "
        '"*.lm_head" or "blocks.*.attn"; * stands for any characters.'
    )


@given(PARTS, PATHS)
def test_a_pattern_that_matches_is_not_refused(parts, path):
    pattern = "".join(parts)
    if not pattern.startswith(".") and not pattern.endswith(".") and scopes.depth(pattern, path):
        assert scopes.check(pattern, "own.toml") is None


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.lm_haed", ("*.lm_head",)),
        ("decoder.layer.0", ("decoder.layers.0",)),
        ("*.layers.0.atn", ("*.layers.0.attn",)),
        ("xyz", ()),
    ],
)
def test_the_nearest_patterns_match_modules(pattern: str, expected: tuple[str, ...]) -> None:
    paths = ["", "decoder", "decoder.layers", "decoder.layers.0", "decoder.layers.0.attn"]
    found = scopes.nearest(pattern, [*paths, "decoder.lm_head"])
    assert found[:1] == expected
