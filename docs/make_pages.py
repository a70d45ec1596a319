"""Writes the pages of the site into a folder, as Markdown for any generator.

    python docs/make_pages.py [FOLDER]   into build/docs; `make docs` then makes the site of them

    NAME.md               the pages of this folder, which are read in the repository as well
    tables/NAME.md        a shipped policy: the rule of every op, and its file
    tables/vocabulary.md  the ops, and what they are called in torch and in JAX
    api/NAME.md           the public names of a module, with their signatures and docstrings
    changelog.md          CHANGELOG.md; so contributing.md, security.md, and figures.md, which is
                          benchmarks/results/FIGURES.md

Links to files of the repository become links to these pages, or to a copy of the file in files/. A
link to a file that does not exist raises an error. Links between pages are the generator's to
check. No framework is imported.
"""

import ast
import posixpath
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from polymp.rules import policy_files
from polymp.rules.policy import Policy
from polymp.rules.row import LOW, Row, Rule
from polymp.rules.vocabulary import vocabulary

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "docs"
COPIED = ("pictures/*.svg", "stylesheets/*.css")

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
# Files of the repository outside of docs/ that are pages, or that a page stands for.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/results/FIGURES.md": "figures.md",
}
STANDS_FOR = {
    "README.md": "index.md",
    "polymp/__init__.py": "api/polymp.md",
    "polymp/torch/__init__.py": "api/torch.md",
    "polymp/torch/fsdp.py": "api/torch.fsdp.md",
    "polymp/jax.py": "api/jax.md",
    "polymp/keras.py": "api/keras.md",
    "polymp/testing/__init__.py": "api/testing.md",
}


def main(out: Path = OUT) -> None:
    """Write all pages, and what they show, into an empty folder."""
    shutil.rmtree(out, ignore_errors=True)
    files: set[str] = set()
    for path, text in pages(files):
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    docs = ROOT / "docs"
    copied = {path: path.relative_to(docs) for glob in COPIED for path in docs.glob(glob)}
    copied |= {ROOT / file: Path(_copy(file)) for file in files}
    for source, place in copied.items():
        (out / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, out / place)


def pages(files: set[str]) -> Iterator[tuple[str, str]]:
    """Path and text of each page; `files` gets the files of the repository that pages link to."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        source = str(path.relative_to(ROOT))
        yield source.removeprefix("docs/"), linked(source, path.read_text("utf-8"), files)
    for source, page in PAGES.items():
        yield page, linked(source, (ROOT / source).read_text("utf-8"), files)
    for name in policy_files.shipped():
        yield f"tables/{name}.md", policy_page(name)
    yield "tables/vocabulary.md", vocabulary_page()
    for module in MODULES:
        yield f"api/{module.removeprefix('polymp.')}.md", api_page(module)


# --- pages of the repository ----------------------------------------------------------------------

LINK = re.compile(r"(?<=\]\()(?!https?:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCED = re.compile(r"^( *`{3,}).*?^\1 *$", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(
    r'<picture><source media="[^"]*dark[^"]*" srcset="(?P<dark>[^"]+)">'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]+)"></picture>'
)


def linked(source: str, text: str, files: set[str]) -> str:
    """The text of a file as a page: all links but those in fenced blocks lead to pages.

    A picture for light and dark screens, which a code host chooses by the reader's system, becomes
    two, of which the site shows that of its own palette.
    """

    def prose(part: str) -> str:
        part = PICTURE.sub(
            r"![\g<alt>](\g<light>#only-light)\n![\g<alt>](\g<dark>#only-dark)", part
        )
        return LINK.sub(lambda m: _target(source, m["path"], files) + (m["anchor"] or ""), part)

    start, parts = 0, []
    for block in FENCED.finditer(text):
        parts += [prose(text[start : block.start()]), block.group()]
        start = block.end()
    return "".join([*parts, prose(text[start:])])


def _target(source: str, link: str, files: set[str]) -> str:
    """Where a link of a file leads, relative to the page that the file becomes."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    pages = PAGES | STANDS_FOR
    if path.startswith("docs/"):
        target = path.removeprefix("docs/")
    elif path in pages:
        target = pages[path]
    elif re.fullmatch(r"policies/[\w-]+\.toml", path):
        target = f"tables/{Path(path).stem}.md"
    elif path.startswith("../") or not (ROOT / path).is_file():
        raise FileNotFoundError(f"{source}: no file {link}")
    else:
        files.add(path)
        target = _copy(path)
    here = PAGES.get(source, source.removeprefix("docs/"))
    return posixpath.relpath(target, posixpath.dirname(here) or ".")


def _copy(file: str) -> str:
    """The place of a copy of a file; generators leave out names with a dot in front."""
    return "/".join(["files", *(part.lstrip(".") for part in file.split("/"))])


# --- policies -------------------------------------------------------------------------------------

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


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> list[str]:
    rows = [list(head), *map(list, lines)]
    rows.insert(1, ["---"] * len(rows[0]))
    return [f"| {' | '.join(row)} |" for row in rows] + [""]


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


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

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
WIDTH = 88
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Source|Warns|Yields):")
ITEM = re.compile(r"(\*{0,2}\w[\w., *]*): (.*)")


def api_page(module: str) -> str:
    """A module's public names: signature, docstring and members of each."""
    names = {name: definition(module, name) for name in public(module)}
    text = [f"# {module}", "", ast.get_docstring(_tree(module)) or "", ""]
    lines = [[f"[`{name}`](#{module}.{name})", _says(where)] for name, where in names.items()]
    text += _table(["name", "is"], lines)
    for name, where in names.items():
        anchor = f"{module}.{name}"
        if not _file(where):
            text += _described(where, name, anchor, 2)
            continue
        text += [f"## {name} {{ #{anchor} }}", "", _markdown(_tree(where)), ""]
        for member in public(where):  # but for what has a place of its own
            if (defined := definition(where, member)) not in names.values():
                text += _described(defined, member, f"{anchor}.{member}", 3)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(text))


def _described(where: str, name: str, anchor: str, level: int) -> Iterator[str]:
    """A function, or a class with its members, below a heading."""
    yield from (f"{'#' * level} {name} {{ #{anchor} }}", "")
    nodes = _nodes(where)
    if isinstance(nodes[-1], ast.ClassDef):
        members = _members(where)
        made = members.pop("__init__", [])
        yield from (_signatures(name, made, method=True), *map(_markdown, [nodes[-1], *made[-1:]]))
        for member, found in members.items():
            yield from (f"{'#' * (level + 1)} {name}.{member} {{ #{anchor}.{member} }}", "")
            yield from (_signatures(member, found, method=True), _markdown(found[-1]), "")
    elif isinstance(nodes[-1], ast.FunctionDef):
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
        yield from (_signatures(name, functions, method=False), _markdown(nodes[-1]), "")
    else:
        yield from (f"```python\n{ast.unparse(nodes[-1])}\n```", "")


def _nodes(where: str) -> list[ast.stmt]:
    """The statements that define a name: several for a function with overloads."""
    module, _, name = where.rpartition(".")
    return [node for node in _tree(module).body if name in _bound(node)]


def _bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []


def _members(where: str) -> dict[str, list[ast.FunctionDef]]:
    """The public methods and properties of a class, with those of bases that polymp has."""
    module, _, _ = where.rpartition(".")
    node = _nodes(where)[-1]
    assert isinstance(node, ast.ClassDef)
    found: dict[str, list[ast.FunctionDef]] = {}
    for part in node.body:
        if isinstance(part, ast.FunctionDef):
            public = not part.name.startswith("_") or part.name == "__init__"
            setter = any(ast.unparse(d).endswith(".setter") for d in part.decorator_list)
            if public and not setter:
                found.setdefault(part.name, []).append(part)
    for base in node.bases:
        try:
            place = definition(module, ast.unparse(base).partition("[")[0])
        except LookupError:  # a base of another library
            continue
        for name, parts in _members(place).items():
            found.setdefault(name, parts)
    return found


def _signatures(name: str, nodes: list[ast.FunctionDef], *, method: bool) -> str:
    """The signatures of a function: those of its overloads, if it has any."""
    overloads = [n for n in nodes if "overload" in map(ast.unparse, n.decorator_list)]
    lines = [_signature(name, node, method=method) for node in overloads or nodes]
    return "\n".join(["```python", *lines, "```", ""]) if lines else ""


def _signature(name: str, node: ast.FunctionDef, *, method: bool) -> str:
    decorators = set(map(ast.unparse, node.decorator_list))
    result = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    if decorators & {"property", "cached_property", "functools.cached_property"}:
        return f"{name}{result.replace(' -> ', ': ')}"
    parts = _parameters(node.args)[method and "staticmethod" not in decorators :]
    line = f"{name}({', '.join(parts)}){result}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){result}"])


def _parameters(args: ast.arguments) -> list[str]:
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults
    parts = [_parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    if args.posonlyargs:
        parts.insert(len(args.posonlyargs), "/")
    if args.vararg:
        parts.append(f"*{_parameter(args.vararg, None)}")
    elif args.kwonlyargs:
        parts.append("*")
    parts += [_parameter(*p) for p in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [*parts, f"**{_parameter(args.kwarg, None)}"] if args.kwarg else parts


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    text = ast.unparse(arg)
    if default is None:
        return text
    return f"{text}{' = ' if arg.annotation else '='}{ast.unparse(default)}"


def _markdown(node: ast.AST) -> str:
    """A docstring, with its sections as headings in bold and their items as lists."""
    doc = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
    lines, section = [], ""
    for line in (doc or "").splitlines():
        if match := SECTION.fullmatch(line):
            section = match[1]
            lines += ["", f"**{section}**", ""]
        elif not section or (line and not line.startswith("    ")):
            section = ""
            lines.append(line)
        elif section in ("Returns", "Source", "Yields"):
            lines.append(line[4:])
        elif item := ITEM.fullmatch(line[4:]):
            lines.append(f"- `{item[1]}`: {item[2]}")
        else:  # an item goes on in the next line
            lines.append(f"  {line.strip()}" if line else "")
    return "\n".join([*lines, ""])


def public(module: str) -> list[str]:
    """The public names of a module, in its order: those of its list of names, if it has one.

    Else what it imports `X as X`, defines, or sets to what another has.
    """
    names, marked = [], list[str]()
    listed: list[str] | None = None
    for node in _statements(module):
        if isinstance(node, ast.ImportFrom):
            names += [a.asname or a.name for a in node.names]
            marked += [a.name for a in node.names if a.asname == a.name]
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed = ast.literal_eval(node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            names += (bound := _bound(node))
            marked += bound
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names += [node.name]
            marked += [node.name]
    chosen = marked if listed is None else listed
    return [n for n in dict.fromkeys(names) if n in chosen and not n.startswith("_")]


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
    node = _tree(where) if _file(where) else _nodes(where)[-1]
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


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
