"""For mkdocs: the examples of docstrings as a section of its own, which they do not have here."""

import re
import textwrap

import griffe


class Doctests(griffe.Extension):
    def on_object(self, *, obj, **_):
        if obj.docstring:
            paragraphs = re.split(r"\n{2,}", obj.docstring.value)
            for i, text in enumerate(paragraphs):
                if text.startswith(">>>"):
                    paragraphs[i] = "Examples:\n" + textwrap.indent(text, "    ")
            obj.docstring.value = "\n\n".join(paragraphs)
