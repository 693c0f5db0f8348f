"""Shows names in docstrings as code: the roles that editors know (``:func:``) are not Markdown."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([^`]+)`")


class Roles(griffe.Extension):
    """Replaces each role by the name that it marks."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of an object that was read.

        Args:
            obj: A module, class, function or attribute.
            **kwargs: Other arguments that griffe passes to extensions.
        """
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
