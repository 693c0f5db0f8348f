"""YAML of configurations: plain values only, so that a small file cannot become a large tree.

Left out are aliases (a few lines of them unfold into gigabytes), tags, merged and repeated keys,
and what is deeper or longer than any configuration.
"""

from typing import Any

import yaml
from yaml.nodes import MappingNode, Node

MAX_BYTES = 2**20
MAX_NODES = 10_000
MAX_DEPTH = 16
MAX_SCALAR = 8192
"""Characters of one value; paths have at most 4096 bytes."""


def parse_yaml(text: str) -> Any:
    """Return the values that a text holds.

    Args:
        text: One YAML document.

    Raises:
        ValueError: It is not YAML, or more than plain values; one line, with the line's number.
    """
    if len(text) > MAX_BYTES:
        raise ValueError(f"it has {len(text):,} characters, and may have {MAX_BYTES:,}")
    try:
        loader = _PlainLoader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


class _PlainLoader(yaml.SafeLoader):
    """Makes values of a document while its nodes stay few, flat, and without aliases."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_nodes = 0
        self._depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        where = f"line {event.start_mark.line + 1}: "
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise ValueError(f"{where}anchors (&) and aliases (*) are not allowed")
        if getattr(event, "tag", None) is not None:
            raise ValueError(f"{where}tags (!) are not allowed")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_SCALAR:
            raise ValueError(f"{where}a value has more than {MAX_SCALAR:,} characters")
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise ValueError(f"{where}there are more than {MAX_NODES:,} values")
        if self._depth == MAX_DEPTH:
            raise ValueError(f"{where}values are nested more than {MAX_DEPTH} deep")
        self._depth += 1
        node: Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def flatten_mapping(self, node: MappingNode) -> None:
        """Refuse keys that are merged or repeated, of which all but one would be lost."""
        seen: set[str] = set()
        for key, _ in node.value:
            where = f"line {key.start_mark.line + 1}: "
            if key.tag == "tag:yaml.org,2002:merge":
                raise ValueError(f"{where}merged keys (<<) are not allowed")
            if isinstance(key.value, str):
                if key.value in seen:
                    raise ValueError(f"{where}{key.value[:60]!a} is named twice")
                seen.add(key.value)
