"""A page as its reader meets it."""

import re
from html.parser import HTMLParser


class Page(HTMLParser):
    """Tags, attributes and text of a page, and whether every element is closed where it should be."""

    VOID = ("meta", "br", "img")

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.texts, self.open = [], [], [], []
        self.feed(text)
        assert self.open == [], f"not closed: {self.open}"
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.texts.append(data)
