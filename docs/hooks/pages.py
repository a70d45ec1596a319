"""A hook of mkdocs: pages made from the repository's data.

    tables/NAME.md        a shipped policy: the rule of every op, and its file
    tables/vocabulary.md  the ops, and what they are called in torch and in JAX
    api/NAME.md           the public names of a module, with their docstrings, by mkdocstrings
    changelog.md          CHANGELOG.md
    contributing.md       CONTRIBUTING.md; so is security.md SECURITY.md
    figures.md            benchmarks/results/FIGURES.md

No framework is imported.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Row, Rule
from polymp.rules.vocabulary import vocabulary

ROOT = Path(__file__).parents[2]

MODULES = (
    "polymp",
    "polymp.torch",
    "polymp.torch.fsdp",
    "polymp.jax",
    "polymp.keras",
    "polymp.lightning",
    "polymp.accelerate",
    "polymp.transformers",
    "polymp.testing",
)
# Pages that the navigation has a place for, and that need not be there.
OPTIONAL = ("seeing.md", "testing.md", "api/testing.md")

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)

UNRULED = (
    "Ops that are not listed have no row: they run in the dtypes of their inputs, and the ops that "
    "they are made of follow their own rules. Names are those of [the vocabulary](vocabulary.md); "
    "[Policies](../policies.md) says which row wins."
)
SINGLE = "One overload of torch or primitive of JAX, with a row of its own:"
NAMES = (
    "The names of ops in policies, by class, and what each op is called in torch and in JAX. Where "
    "JAX has no primitive or function for an op, the table says what the op becomes in a trace. "
    "The data is `policies/vocabulary.toml`."
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take optional pages that are not there out of the navigation."""
    there = {page for page in OPTIONAL if (ROOT / "docs" / page).is_file()}
    there |= {_api(module) for module in MODULES if _file(module)}
    for section in config.nav or []:
        if isinstance(section, dict):
            for name, pages in section.items():
                if isinstance(pages, list):
                    section[name] = [p for p in pages if _path(p) not in {*OPTIONAL} - there]
    return config


def _path(entry: str | dict[str, str]) -> str:
    return entry if isinstance(entry, str) else next(iter(entry.values()))


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages."""
    _tree.cache_clear()  # mkdocs serve builds more than once
    for path, text in pages():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> Iterator[tuple[str, str]]:
    """Path and text of each page that is made."""
    for name in policy_files.shipped():
        yield f"tables/{name}.md", policy_page(name)
    yield "tables/vocabulary.md", vocabulary_page()
    for module in MODULES:
        if _file(module):
            yield _api(module), api_page(module)
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/results/FIGURES.md"):
        yield Path(name).name.lower(), (ROOT / name).read_text(encoding="utf-8")


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    rows = [list(head), *map(list, lines)]
    rows.insert(1, ["---"] * len(rows[0]))
    return [f"| {' | '.join(row)} |" for row in rows] + [""]


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# --- policies ------------------------------------------------------------------------------------


def policy_page(name: str) -> str:
    """A policy: by rule and class the ops that it is for, and the file."""
    policy, content = policy_files.load(name), policy_files.text(name)
    text = [f"# {name}", "", policy_files.summary(name), ""]
    found: dict[tuple[Rule, tuple[str, ...]], dict[tuple[str, str], list[str]]] = {}
    for op, dtype, row in rows(policy):
        kind = vocabulary().ops[op].kind
        found.setdefault((row.rule, dtype), {}).setdefault((kind, row.source), []).append(op)
    counts = [
        [f"[`{rule}`](#{_anchor(rule, dtypes)})", rule.phrase, str(sum(map(len, ops.values())))]
        for (rule, dtypes), ops in sorted(found.items(), key=_order)
    ]
    text += [*_table(["rule", "an op with this rule", "ops"], counts)]
    text += [UNRULED, ""]
    for (rule, dtypes), ops in sorted(found.items(), key=_order):
        means = f"An op with this rule {rule.phrase}."
        text += [f"## {_title(rule, dtypes)}", "", means, ""]
        lines = [
            [kind, _code(sorted(names)), _page(source)] for (kind, source), names in ops.items()
        ]
        text += _table(["class", "ops", "row in"], sorted(lines))
        if rule is Rule.FORBID:
            text += [*_instead(policy, ops), ""]
    if single := [row for row in policy.rows if re.match("aten:|jax:", row.of)]:
        text += ["## Single spellings", "", SINGLE]
        lines = [[f"`{r.of}`", f"`{r.rule}`", r.dtype or "any", _page(r.source)] for r in single]
        text += ["", *_table(["spelling", "rule", "dtype", "row in"], lines)]
    about = f"`policies/{name}.toml`, with the reason for each group of rows:"
    text += ["## The file", "", about, ""]
    return "\n".join([*text, "```toml", content.rstrip(), "```", ""])


def rows(policy: Policy) -> Iterator[tuple[str, tuple[str, ...], Row]]:
    """Op, dtypes and row, for all ops of the vocabulary that have a row."""
    for op in vocabulary().ops:
        by: dict[Row, list[str]] = {}
        for dtype in LOW:
            row = policy.why(op, dtype).row
            if row is not None and row.rule is not Rule.PARTS:
                by.setdefault(row, []).append(dtype)
        for row, dtypes in by.items():
            yield op, tuple(dtypes) if len(dtypes) < len(LOW) else (), row


def _order(item: tuple[tuple[Rule, tuple[str, ...]], object]) -> tuple[int, tuple[str, ...]]:
    rule, dtypes = item[0]
    return list(Rule).index(rule), dtypes


def _title(rule: Rule, dtypes: tuple[str, ...]) -> str:
    return " ".join([rule, *(["in", " and ".join(dtypes)] if dtypes else [])])


def _anchor(rule: Rule, dtypes: tuple[str, ...]) -> str:
    return _title(rule, dtypes).lower().replace(" ", "-")


def _page(source: str) -> str:
    name = Path(source).stem
    return f"[{name}]({name}.md)"


def _instead(policy: Policy, ops: dict[tuple[str, str], list[str]]) -> Iterator[str]:
    for name in sorted(name for names in ops.values() for name in names):
        row = policy.why(name, LOW[0]).row
        if row is not None and row.instead:
            yield f"Instead of `{name}` use `{row.instead}`."


def vocabulary_page() -> str:
    """The ops by class, with what they are called."""
    v = vocabulary()
    text = ["# Vocabulary", "", NAMES, ""]
    kinds = [[f"[{k}](#{k})", about, str(len(v.members(k)))] for k, about in v.kinds.items()]
    text += _table(["class", "its ops", "ops"], kinds)
    for kind, about in v.kinds.items():
        text += [f"## {kind}", "", about, ""]
        lines = []
        for op in v.members(kind):
            traces = f"becomes {_code(op.traces)}" if op.traces else ""
            note = op.note.replace("|", "\\|")
            jax = "<br>".join(filter(None, [_code(op.jax), _code(op.functions), traces, note]))
            lines.append([f"`{op.name}`", _code(op.aten), jax])
        text += _table(["op", "torch", "JAX"], lines)
    return "\n".join(text)


# --- the API -------------------------------------------------------------------------------------


def api_page(module: str) -> str:
    """A module's public names, each by a directive of mkdocstrings.

    The directive has the place of the definition; a public name may also be that of a module.
    """
    names = {name: definition(module, name) for name in public(module)}
    text = [f"# {module}", "", ast.get_docstring(_tree(module)) or "", ""]
    lines = [[f"[`{name}`](#{module}.{name})", _says(where)] for name, where in names.items()]
    text += _table(["name", "is"], lines)
    for name, where in names.items():
        text += [f"[](){{#{module}.{name}}}", "", f"::: {where}", "    options:"]
        text += [f'      heading: "{name}"', f'      toc_label: "{name}"']
        if _file(where):  # a module: without what has a place of its own
            members = [m for m in public(where) if f"{where}.{m}" not in names.values()]
            text += [f"      members: [{', '.join(members)}]"]
        text += [""]
    return "\n".join(text)


def _api(module: str) -> str:
    return f"api/{module.removeprefix('polymp.')}.md"


def public(module: str) -> list[str]:
    """The public names of a module, in its order: those of its list of names, if it has one.

    Else what it imports `X as X`, defines, or sets to what another has.
    """
    names, listed = [], list[str]()
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom):
            names += [a.asname or a.name for a in node.names]
            listed += [a.name for a in node.names if a.asname == a.name]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
            break
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            names += [ast.unparse(target) for target in node.targets]
            listed += [ast.unparse(target) for target in node.targets]
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names += [node.name]
            listed += [node.name]
    return [n for n in dict.fromkeys(names) if n in listed and not n.startswith("_")]


def definition(module: str, name: str) -> str:
    """Dotted name of what a module's name stands for: where it is defined.

    Raises:
        LookupError: it is not defined there.
    """
    for node in reversed(_statements(module)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return f"{module}.{name}"
        if isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            other, _, own = ast.unparse(node.value).rpartition(".")
            return definition(definition(module, other), own)
        if isinstance(node, ast.ImportFrom) and node.module != module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(str(node.module), alias.name)
    if _file(f"{module}.{name}"):
        return f"{module}.{name}"
    raise LookupError(f"{module} has no {name}")


def _says(where: str) -> str:
    """The first sentence of a docstring, for a cell of a table."""
    module, _, name = where.rpartition(".")
    node: ast.AST | None = _tree(where) if _file(where) else None
    for found in () if node else _tree(module).body:  # the overloads of a function come first
        if isinstance(found, ast.ClassDef | ast.FunctionDef) and found.name == name:
            node = found
    doc = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
    if not doc:
        raise LookupError(f"{where} is public and has no docstring")
    paragraph = " ".join(doc.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(":.").replace("|", "\\|") + "."


def _statements(module: str) -> list[ast.stmt]:
    """The statements of a module, and imports below `if TYPE_CHECKING` of what comes late."""
    found = []
    for node in _tree(module).body:
        late = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        found += node.body if late else [node]
    return found


@cache
def _tree(module: str) -> ast.Module:
    path = _file(module)
    if path is None:
        raise LookupError(f"there is no module {module}")
    return ast.parse(path.read_text(encoding="utf-8"))


def _file(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    return next((p for p in (base / "__init__.py", base.with_suffix(".py")) if p.is_file()), None)
