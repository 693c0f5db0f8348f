"""The viewer that is in the package: which one, and what may be done with it."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "unet3d/reports/pages/niivue"


def test_the_viewer_is_the_version_that_the_tool_makes():
    script = (ROOT / "tools/vendor_niivue.sh").read_text()
    version = re.search(r"^niivue=(.+)$", script, re.MULTILINE)
    source = (FOLDER / "niivue.js").read_text("ascii")
    assert version is not None
    assert source.startswith(f"// NiiVue {version[1]}, made by tools/vendor_niivue.sh\n")
    assert f'name:"@niivue/niivue",version:"{version[1]}"' in source


def test_the_viewer_can_stand_in_a_page_without_rights():
    source = (FOLDER / "niivue.js").read_text("ascii")
    for word in ("</script", "<!--", "eval(", "new Function(", "WebAssembly", "new Worker("):
        assert word not in source, word


def test_every_part_has_its_licence():
    assert "Redistributions in binary form" in (FOLDER / "LICENSE").read_text()
    script = (ROOT / "tools/vendor_niivue.sh").read_text()
    listed = re.search(r"parts=\((.*?)\)", script, re.DOTALL)
    assert listed is not None
    parts = listed[1].split()
    sections = (FOLDER / "LICENSES-OF-PARTS.txt").read_text().split("\n==== ")[1:]
    assert [section.partition(" ====")[0] for section in sections] == parts
    assert len(parts) == 6
    for section in sections:
        assert "Permission" in section and "Copyright" in section
