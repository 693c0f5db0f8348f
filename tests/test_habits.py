"""Rules that the tests themselves keep."""

import re
from pathlib import Path


def test_no_test_module_imports_another():
    """What several of them use is in helper modules."""
    importing = re.compile(r"^\s*(?:from|import) (?:tests|\.)(?:.*|.*\(\s*)\btest_", re.MULTILINE)
    for path in Path(__file__).parent.rglob("*.py"):
        assert not importing.search(path.read_text()), path
