"""Rules for the tests themselves."""

import re
from pathlib import Path


def test_no_test_module_imports_another():
    """Helper modules have what several test modules use."""
    importing = re.compile(r"^\s*(?:from|import) (?:tests|\.)(?:.*|.*\(\s*)\btest_", re.MULTILINE)
    for path in Path(__file__).parent.rglob("*.py"):
        assert not importing.search(path.read_text()), path
