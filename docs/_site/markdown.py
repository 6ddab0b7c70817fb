"""A hook of mkdocs that turns GitHub's Markdown into what mkdocs understands.

Pages link to files outside docs/ by relative paths, which work on GitHub and in a checkout. The
site has only docs/, so of these links it has the texts. A fence such as "sh test" marks a
block that a test runs; mkdocs takes one word there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^]\[]+)\]\((\.\./[^)\s#]*)[^)\s]*\)")
_FENCE = re.compile(r"^(```\w+) \w+$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    docs = Path(config["docs_dir"]).resolve()
    folder = docs / Path(page.file.src_uri).parent

    def without_others(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        return found[0] if target.is_relative_to(docs) or not target.exists() else found[1]

    return _LINK.sub(without_others, _FENCE.sub(r"\1", markdown))
