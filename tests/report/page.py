"""Reads a page back, as a reader's program would."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Elements in order, with their attributes and text."""

    VOID = frozenset({"meta", "br", "path", "use", "link", "img", "hr", "input", "rect"})

    def __init__(self, html):
        super().__init__()
        self.ids = []
        self.links = []
        self.tags = []
        self.data = []
        self.texts = []
        self._context = {}
        self._open = None
        self._seen = []
        self.depth = 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = {k: v or "" for k, v in attrs}
        self.tags.append(tag)
        if "id" in found:
            self.ids.append(found["id"])
        self.links += [(k, v) for k, v in found.items() if k in ("src", "href", "action", "data", "poster", "srcset")]
        if tag == "tr":
            self._context = found
        if tag == "data":
            self._open, self._seen = found["value"], []
        if tag not in self.VOID:
            self.depth += 1

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.depth -= 1

    def handle_endtag(self, tag):
        if tag == "data" and self._open is not None:
            where = tuple(self._context.get(k, "") for k in ("data-domain", "data-row", "data-subdomain"))
            self.data.append((where, self._open, "".join(self._seen)))
            self._open = None
        if tag not in self.VOID:
            self.depth -= 1

    def handle_data(self, data):
        self.texts.append(data)
        if self._open is not None:
            self._seen.append(data)

    @property
    def text(self):
        return "".join(self.texts)
