"""MkDocs hook: gives every page the path that it has in the repository, so that the same links work in both."""

import re
from pathlib import Path

from mkdocs.structure.files import File

OUTSIDE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "slurm/README.md"]
"""Pages of the site that are not in docs/."""


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
