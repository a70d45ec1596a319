"""The documentation as a site: it builds strictly, stands alone, and is what the data says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

from polymp.rules import policy_files
from polymp.rules.row import LOW, Rule
from polymp.rules.vocabulary import vocabulary
from tests.conftest import FRAMEWORKS, need
from tests.support import processes
from tests.support.blocks import ROOT

DOCS = ROOT / "docs"


def module(path: Path) -> ModuleType:
    """A file of docs/, which is no package, as a module."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def build(pages: Path, out: Path) -> subprocess.CompletedProcess[str]:
    config = pages.parent / "mkdocs.yml"
    ours = {"INHERIT": ROOT / "mkdocs.yml", "docs_dir": pages, "site_dir": out}
    config.write_text("".join(f"{key}: {value}\n" for key, value in ours.items()))
    command = "-m", "mkdocs", "build", "--strict", "-f", config  # with -q nothing is strict
    return processes.python(*command, code=None, env={"NO_MKDOCS_2_WARNING": "1"})


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    return module(DOCS / "make_pages.py")


@pytest.fixture(scope="module")
def written(pages: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pages") / "docs"
    pages.main(out)
    return out


@pytest.fixture(scope="module")
def site(written: Path) -> Path:
    need("mkdocs")
    out = written.parent / "site"
    child = build(written, out)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "excluded" not in child.stderr
    return out


class Html(HTMLParser):
    """A page's links, the files that it loads, and the names of its parts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.names: set[str] = set()
        self.text: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.names |= {found[name] for name in ("id", "name") if name in found}
        if "href" in found and tag == "a":
            self.links.append(found["href"])
        elif "href" in found and tag == "link" and found.get("rel") != "canonical":
            self.loads.append(found["href"])
        if "src" in found:
            self.loads.append(found["src"])

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def faults(folder: Path) -> Iterator[str]:
    """Yield files that are loaded from elsewhere, and links to pages or names that are missing."""
    parsed = {path: Html(path) for path in sorted(folder.rglob("*.html"))}
    for path, page in parsed.items():
        for link in page.loads:
            if urlsplit(link).netloc:
                yield f"{path.name} loads {link}"
        for link in page.links + page.loads:
            to = urlsplit(link)
            if to.scheme or to.netloc:
                continue
            base = folder if to.path.startswith("/") else path.parent
            target = (base / unquote(to.path).lstrip("/")).resolve() if to.path else path
            target = target / "index.html" if target.is_dir() else target
            name = unquote(to.fragment)
            if not target.is_file():
                yield f"{path.name}: {link} is not there"
            elif target in parsed and name and name not in parsed[target].names | {"__skip"}:
                yield f"{path.name}: {link} has no such part"
    for path in folder.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"(?:url\(|@import\s*)[\"']?((?:https?:)?//[^\"')]+)", text):
            yield f"{path.name} loads {link}"


def test_the_site_stands_alone(site: Path) -> None:
    assert list(faults(site)) == []
    built = {str(path.relative_to(site).with_suffix(".md")) for path in site.rglob("*.html")}
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert written <= built
    assert not [path for path in site.rglob("*.py") if "files" not in path.parts]
    assert (site / "files" / "github" / "workflows" / "ci.yml").is_file()


def test_links_out_of_the_folder_lead_to_pages_and_copies(site: Path) -> None:
    assert "tables/amp.html" in Html(site / "policies.html").links
    assert "files/benchmarks/policy_costs.py" in Html(site / "policies.html").links
    assert not (site / "files" / "polymp" / "jax.py").exists()
    copy, original = site / "files/benchmarks/policy_costs.py", ROOT / "benchmarks/policy_costs.py"
    assert copy.read_bytes() == original.read_bytes()
    api = {"api/polymp.html", "api/torch.html", "api/jax.html"}
    assert api <= set(Html(site / "index.html").links)
    assert "differences.html" in Html(site / "changelog.html").links


def test_a_picture_has_a_form_for_each_palette(site: Path, written: Path) -> None:
    html = (site / "architecture.html").read_text(encoding="utf-8")
    assert set(re.findall(r'data-md-color-scheme="(\w+)"', html)) == {"default", "slate"}
    page = (written / "architecture.md").read_text(encoding="utf-8")
    for palette in ("light", "dark"):
        assert f"(pictures/torch-region-{palette}.svg#only-{palette})" in page
    assert "<picture>" not in page


def test_a_dead_link_out_of_the_folder_is_refused(pages: ModuleType) -> None:
    with pytest.raises(FileNotFoundError, match=r"^docs/index\.md: no file \.\./none\.py$"):
        pages.linked("docs/index.md", "[a](../none.py)", set())


def listed(page: str) -> dict[tuple[str, str], str]:
    """By op and dtype the rule that a policy's page has."""
    found: dict[tuple[str, str], str] = {}
    for section in re.split(r"^## ", page.partition("\n## The file\n")[0], flags=re.MULTILINE)[1:]:
        heading, _, body = section.partition("\n")
        rule, _, dtypes = heading.partition(" in ")
        if rule not in set(Rule):
            continue
        for line in re.findall(r"^\|.*\|$", body, re.MULTILINE)[2:]:
            for op in re.findall(r"`(\w+)`", line.split("|")[2]):
                for dtype in dtypes.split(" and ") if dtypes else LOW:
                    assert (op, dtype) not in found
                    found[op, dtype] = rule
    return found


@pytest.mark.parametrize("name", policy_files.shipped())
def test_the_page_of_a_policy_has_the_rule_of_every_op(name: str, pages: ModuleType) -> None:
    policy, page = policy_files.load(name), pages.policy_page(name)
    rules = {(op, f): policy.why(op, f) for op in vocabulary().ops for f in LOW}
    wanted = {
        key: str(why.rule)
        for key, why in rules.items()
        if why.row is not None and why.rule != Rule.PARTS
    }
    assert len(wanted) > 60
    assert listed(page) == wanted
    assert policy_files.text(name).rstrip() in page
    assert policy_files.summary(name) in page


def test_the_vocabulary_has_every_op(pages: ModuleType) -> None:
    page = pages.vocabulary_page()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == [
        op.name for kind in vocabulary().kinds for op in vocabulary().members(kind)
    ]


def letters(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", text)


@pytest.mark.parametrize("name", ["polymp", "polymp.torch", "polymp.jax"])
def test_every_public_name_has_its_docstring(name: str, site: Path, pages: ModuleType) -> None:
    framework = name.rpartition(".")[2]
    if framework in FRAMEWORKS:
        need(framework)
    door = importlib.import_module(name)
    public = {**vars(door), **{n: getattr(door, n) for n in dir(door)}}  # some are imported late
    objects = {n: x for n, x in public.items() if not n.startswith("_") and not inspect.ismodule(x)}
    modules = {n for n in pages.public(name) if inspect.ismodule(public[n])}
    assert sorted(pages.public(name)) == sorted([*objects, *modules])
    assert modules >= ({"dtypes"} if name == "polymp" else set())

    html = Html(site / "api" / f"{framework}.html")
    text = letters("".join(html.text))
    for n in pages.public(name):
        assert f"{name}.{n}" in html.names
        if inspect.isclass(public[n]):
            own = {m for m in vars(public[n]) if not m.startswith("_")}
            methods = {m for m in own if callable(getattr(public[n], m))}
            assert {f"{name}.{n}.{m}" for m in methods} <= html.names
        doc = inspect.getdoc(public[n])
        assert doc, f"{name}.{n} has no docstring"
        last = doc.split("\n\n")[0].split("\n")[-1]
        assert letters(last) in text, f"{name}.{n}: {last}"


def test_every_public_module_has_a_page_with_all_its_names(pages: ModuleType) -> None:
    for name in pages.MODULES:
        tree = ast.parse(pages._file(name).read_text(encoding="utf-8"))
        lists = [n.value for n in tree.body if isinstance(n, ast.Assign) and _is_list(n)]
        listed = ast.literal_eval(lists[0]) if lists else []
        assert {n for n in listed if not n.startswith("_")} <= {*pages.public(name)}, name
        page = pages.api_page(name)
        assert page.count("\n## ") == len(pages.public(name)) > 0, name


def _is_list(node: ast.Assign) -> bool:
    return ast.unparse(node.targets[0]) == "__all__"


def test_a_public_name_without_a_docstring_is_refused(pages: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("from polymp import dtypes as dtypes\ndef f(): ...\n")
    pages._tree.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "ROOT", tmp_path)
        assert pages.public("some") == ["dtypes", "f"]
        with pytest.raises(LookupError, match=r"^some\.f is public and has no docstring$"):
            pages._says("some.f")
        with pytest.raises(LookupError, match=r"^some has no g$"):
            pages.definition("some", "g")
    pages._tree.cache_clear()


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    need("matplotlib")
    return module(DOCS / "pictures" / "draw.py")


def test_the_pictures_are_what_the_program_draws(draw: ModuleType) -> None:
    drawn = dict(draw.pictures())
    kept = {path.name: path.read_text(encoding="utf-8") for path in draw.HERE.glob("*.svg")}
    assert drawn == kept, "run docs/pictures/draw.py"
    for name, text in drawn.items():
        assert re.findall(r"(?:href|url)\S*https?:", text) == [], name


def test_the_walks_through_the_code_name_the_files_of_their_pictures(draw: ModuleType) -> None:
    """At most six each; test_docs.py has that they exist."""
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    for name, steps in draw.walks().items():
        (section,) = (s for s in page.split("\n## ") if f"pictures/{name}-light.svg" in s)
        files = {*re.findall(r"\]\(\.\./([\w/.]+)\)", section)}
        assert {file for _, file in steps if file} <= files, name
        assert len(files) <= 6, name
