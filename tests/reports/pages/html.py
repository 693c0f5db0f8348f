"""The content of a page, read with Python's own parser."""

import base64
import hashlib
import re
from html.parser import HTMLParser

VOID = {"meta", "img", "input", "br"}


class Page(HTMLParser):
    """The elements, texts and addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.texts, self.rows, self._open = [], [], [], [], []
        self.addresses = []
        """Addresses of everything that a browser would load."""
        self.sources = {"script": [], "style": []}
        """Content of scripts that run, and of styles."""
        self.data = {}
        """Content of scripts that do not run, by id."""
        self.policy = ""
        self.handlers = []
        """Attributes that would run code or set a style."""
        self.feed(text)
        self.close()
        assert not self._open, self._open

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append(tag)
        self.handlers += [name for name in values if name.startswith("on") or name == "style"]
        if tag not in VOID:
            self._open.append((tag, values))
        if values.get("http-equiv") == "Content-Security-Policy":
            self.policy = values["content"] or ""
        for name in ("src", "srcset", "data", "poster", "background", "action"):
            self.addresses += [values[name] or ""] if name in values else []
        if values.get("href"):
            (self.links if tag == "a" else self.addresses).append(values["href"] or "")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        opened, _ = self._open.pop()
        assert opened == tag, f"</{tag}> ends <{opened}>"

    def handle_data(self, data: str) -> None:
        tag, values = self._open[-1] if self._open else ("", {})
        if tag == "script" and values.get("type"):
            self.data[str(values["id"])] = data
        elif tag in self.sources:
            self.sources[tag].append(data)
        else:
            self.texts.append(data)
            if any(name in ("td", "th") for name, _ in self._open):
                self.rows[-1][-1] += data

    def cells(self, name: str, column: int = 0) -> list[str]:
        """Return the cells of the first row that has this name in one of its columns."""
        return next([cell.strip() for cell in row] for row in self.rows if name in row[column])


def assert_closed(page: Page) -> None:
    """Check that a page loads nothing, and that no code or style but its own can run."""
    for address in page.addresses:
        assert re.match(r"data:image/(png|svg\+xml);base64,", address), address[:60]
    directives = dict(part.strip().partition(" ")[::2] for part in page.policy.split(";"))
    assert directives["default-src"] == "'none'" and directives["img-src"] == "data:"
    for kind, directive in (("script", "script-src"), ("style", "style-src")):
        digests = [
            base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
            for source in page.sources[kind]
        ]
        expected = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
        assert directives[directive] == expected
    assert page.handlers == []
    assert not {"iframe", "object", "embed", "base", "form", "link"} & set(page.tags)
