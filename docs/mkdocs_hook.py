"""MkDocs hook: gives every page the path that it has in the repository, so that the same links work in both.

Search works without a network in pages that are opened from the disk: the theme's plugin `offline` loads a script of
1.4 kB from unpkg.com, and this puts the copy of it in docs/ in its place.
"""

import re
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from mkdocs.utils import get_relative_url

OUTSIDE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "slurm/README.md"]
"""Pages of the site that are not in docs/."""

SCRIPT = "https://unpkg.com/iframe-worker/shim"
"""The script that stands in for `Worker`, which browsers refuse to a page from the disk."""

COPY = "docs/iframe_worker.js"
"""Its place in the site."""


def on_files(files, config):
    """Puts the files of docs/ into a folder docs/ of the site, and adds the pages outside of it."""
    root = Path(config.config_file_path).parent
    inside = [file for file in files if file.src_dir == config.docs_dir]
    for file in inside:
        files.remove(file)
    for path in [*OUTSIDE, *(f"docs/{file.src_uri}" for file in inside)]:
        files.append(File.generated(config, path, abs_src_path=str(root / path)))
    return files


def on_page_markdown(markdown, **_):
    """Indents nested lists by four spaces: with the two that GitHub needs, Python-Markdown shows them flat."""
    return re.sub(r"^  (?=- )", "    ", markdown, flags=re.MULTILINE)


def on_post_page(output, page, **_):
    """Loads the script from the site itself."""
    if SCRIPT not in output:
        raise PluginError(f"the theme no longer loads {SCRIPT}: does search work in pages opened from the disk?")
    return output.replace(SCRIPT, get_relative_url(COPY, page.url))


def on_post_template(output_content, **_):
    """The same for 404.html."""
    return output_content.replace(SCRIPT, f"/{COPY}")
