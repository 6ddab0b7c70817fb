"""A hook of mkdocs that turns GitHub's Markdown into what mkdocs understands.

Pages link to files outside docs/ by relative paths, which work on GitHub and in a checkout. The
site has only docs/, so these links get the repository's address. A fence such as "sh test" marks a
block that a test runs; mkdocs takes one word there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\((\.\./[^)\s#]*)")
_FENCE = re.compile(r"^(```\w+) \w+$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    docs = Path(config["docs_dir"]).resolve()
    folder = docs / Path(page.file.src_uri).parent

    def absolute(found: re.Match[str]) -> str:
        target = (folder / found[1]).resolve()
        if target.is_relative_to(docs) or not target.exists():
            return found[0]
        return f"]({config['repo_url']}/{target.relative_to(docs.parent)}"

    return _LINK.sub(absolute, _FENCE.sub(r"\1", markdown))
