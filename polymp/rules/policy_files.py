"""Policies from where they are: shipped ones by name, users' own from TOML files or plain data.

    [rules]
    softmax = "fp32"
    "class:matmul" = { float16 = "lower", bfloat16 = "keep" }
    binary_cross_entropy = { rule = "forbid", instead = "binary_cross_entropy_with_logits" }
    [scopes."*.lm_head"]
    linear = "fp32"

`extends` names a policy whose rows hold where the table has none. The result is a `Policy`, or a
PolicyError that says where the fault is, what it is and what to write instead.
"""

import os
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from polymp.errors import NoPolicyError, PolicyError
from polymp.rules.policy import Policy, check_keys, from_data
from polymp.rules.row import Row
from polymp.rules.vocabulary import nearest

Source = str | os.PathLike[str] | Mapping[str, object] | Policy


def load(source: Source) -> Policy:
    """Return a policy: a shipped one by name, or one of the user's from a file or a dict.

        polymp.policy("amp"), polymp.policy("mine.toml"), polymp.policy({"rules": {"exp": "fp32"}})

    Args:
        source: a policy, returned as it is; plain data (see the module); the path of a TOML file
            (a `Path`, or a string that ends in .toml); or a shipped policy's name.

    Returns:
        The policy.

    Raises:
        PolicyError: no such policy or file, not TOML, or wrong content.
    """
    if isinstance(source, Policy):
        return source
    if isinstance(source, Mapping):
        return _policy(source, "unnamed")
    if not isinstance(source, (str, os.PathLike)):
        raise PolicyError(
            f"a policy is a Policy, a name, the path of a TOML file or a dict, not {source!r}."
        )
    if isinstance(source, os.PathLike) or source.endswith(".toml"):
        return _file(Path(source), ())
    return _shipped(source)


def _file(path: Path, above: tuple[Path, ...]) -> Policy:
    cannot = f"cannot read policy file {str(path)!r}"
    try:
        resolved = path.resolve()
        text = "" if resolved in above else path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise PolicyError(f"{cannot}: it is not UTF-8.") from None
    except (OSError, ValueError, RuntimeError) as error:  # a NUL; before 3.13 a circle of links
        raise NoPolicyError(f"{cannot}: {getattr(error, 'strerror', error)}.") from None
    if resolved in above:
        raise PolicyError(f"policy file {str(path)!r} extends itself, by way of its base.")
    return _policy(_toml(text, str(path)), path.stem, str(path), (*above, resolved))


@cache
def _shipped(name: str) -> Policy:
    if name not in shipped():
        raise NoPolicyError(
            f"no policy {name!r}.{nearest(name, shipped())} "
            f"Shipped: {', '.join(shipped())}; a file's name ends in .toml."
        )
    where = f"policies/{name}.toml"
    return _policy(_toml(text(name), where), name, where)


def text(name: str) -> str:
    """The file of a shipped policy, as it is."""
    return (resources.files("polymp.policies") / f"{name}.toml").read_text(encoding="utf-8")


def shipped() -> tuple[str, ...]:
    """The names of the policies that come with polymp, sorted."""
    files = resources.files("polymp.policies").iterdir()
    names = {f.name.removesuffix(".toml") for f in files if f.name.endswith(".toml")}
    return tuple(sorted(names - {"vocabulary"}))


@cache
def shipped_rows() -> frozenset[Row]:
    """The rows of all shipped policies."""
    # Some are for ops that one framework does not have, and the vocabulary says why; in a user's
    # policy such a row is an error.
    return frozenset(row for name in shipped() for row in _shipped(name).rows)


def summary(name: str) -> str:
    """A sentence on the use of a shipped policy."""
    return str(_toml(text(name), name).get("summary", ""))


def _toml(content: str, where: str) -> Mapping[str, object]:
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        raise PolicyError(f"{where} is not TOML: {error}.") from None
    except (ValueError, RecursionError):
        raise PolicyError(f"{where}: a number or the nesting of brackets is too long.") from None


_KEYS = ("name", "summary", "extends", "halves", "fp8", "few_rows", "rules", "scopes")


def _policy(
    data: Mapping[str, object], name: str, where: str = "", above: tuple[Path, ...] = ()
) -> Policy:
    name = str(data.get("name", name))
    where = where or f"policy {name!r}"
    check_keys(data, _KEYS, where)
    if data.keys().isdisjoint(("extends", "rules", "scopes")):
        raise PolicyError(f'{where} has no rows. Write rows below [rules], or extends = "amp".')
    return from_data(data, name, where, _base(data.get("extends"), where, above))


def _base(extends: object, where: str, above: tuple[Path, ...]) -> Policy | None:
    if extends is None:
        return None
    if not isinstance(extends, (str, Policy)):
        raise PolicyError(f"{where}: extends = {extends!r} is not the name or path of a policy.")
    try:
        if isinstance(extends, str) and extends.endswith(".toml"):
            return _file(above[-1].parent / extends if above else Path(extends), above)
        return load(extends)
    except PolicyError as error:
        raise PolicyError(f"{where}: extends = {extends!r}: {error}") from None
