"""A hook of mkdocs: links of pages to files outside of docs/ become links of the site.

The pages are read in the repository as well, where `../policies/amp.toml` is a file. In the site

    policies/NAME.toml      is the page tables/NAME.md, which pages.py makes
    README.md               is index.md
    CHANGELOG.md            is changelog.md; so are CONTRIBUTING.md, SECURITY.md and the tables of
                            benchmarks/results
    polymp/jax.py           is api/jax.md, which pages.py makes; so are the other public modules
    docs/NAME.md            is NAME.md; for links of the changelog
    any other file          is a link to the repository, if `repo_url` is set; otherwise to a copy
                            in the site, under files/

A link to a file that does not exist stays as it is, and mkdocs warns.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/results/FIGURES.md": "figures.md",
    "polymp/__init__.py": "api/polymp.md",
    "polymp/torch/__init__.py": "api/torch.md",
    "polymp/torch/fsdp.py": "api/torch.fsdp.md",
    "polymp/jax.py": "api/jax.md",
    "polymp/keras/__init__.py": "api/keras.md",
    "polymp/testing/__init__.py": "api/testing.md",
}
# Pages that are a file of the repository.
SOURCES = {page: path for path, page in PAGES.items() if not page.startswith(("index", "api/"))}

LINK = re.compile(r"(?<=\]\()(?!https?:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
FENCED = re.compile(r"^( *`{3,}).*?^\1 *$", re.MULTILINE | re.DOTALL)


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files, **_: Any
) -> str:
    """The page's text with its links changed, all but what stands in fenced blocks."""
    start, parts = 0, []
    for block in FENCED.finditer(markdown):
        parts += [_prose(markdown[start : block.start()], page, config, files), block.group()]
        start = block.end()
    return "".join([*parts, _prose(markdown[start:], page, config, files)])


def _prose(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def leads(link: re.Match[str]) -> str:
        return _target(link["path"], page, config, files) + (link["anchor"] or "")

    return LINK.sub(leads, text)


def _target(link: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    source = SOURCES.get(uri, f"docs/{uri}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if path.startswith("docs/"):
        target = path.removeprefix("docs/")
    elif path in PAGES:
        target = PAGES[path]
    elif path.startswith("policies/") and path.endswith(".toml"):
        target = f"tables/{Path(path).stem}.md"
    elif not (ROOT / path).is_file() or path.startswith("../"):
        return link
    elif config.repo_url:
        return f"{config.repo_url.rstrip('/')}/blob/HEAD/{path}"
    else:
        target = f"files/{path}"
        if files.get_file_from_path(target) is None:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / path)))
    return posixpath.relpath(target, posixpath.dirname(uri) or ".")
