"""Search the docs that Sphinx has built, as the search field of the site does:
``python tests/docs/search.py FOLDER``.

A reader types a word of the problem; the page with the answer must be among the results. ``make
docs`` runs it with the Python that has Sphinx.
"""

import json
import sys
from pathlib import Path

from sphinx.search.en import SearchEnglish

#: What a reader types, and a page that must be found.
SEARCHES = {
    "double charge": "incidents",
    "retry": "how-to/call-from-a-client",
    "stuck": "how-to/a-key-is-stuck",
    "outbox": "how-to/stage-a-job",
    "webhook": "how-to/receive-webhooks",
}


def found(index: dict[str, object], text: str) -> set[str]:
    """Return the pages that contain each word of the text, in their text or in a title."""
    language, results = SearchEnglish({}), []
    for word in language.split(text):
        stem = language.stem(word.lower())
        pages: set[int] = set()
        for kind in ("terms", "titleterms"):
            hits = index[kind].get(stem, [])  # type: ignore[attr-defined]
            pages |= {hits} if isinstance(hits, int) else set(hits)
        results.append(pages)
    return {index["docnames"][page] for page in set.intersection(*results)}  # type: ignore[index]


def main(folder: Path) -> list[str]:
    """Return a line for each search that does not find its page."""
    text = (folder / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    return [
        f"A search for {text!r} does not find {page}."
        for text, page in SEARCHES.items()
        if page not in found(index, text)
    ]


if __name__ == "__main__":
    sys.exit("\n".join(main(Path(sys.argv[1]))) or None)
