"""The viewer in the package: its version, its safety within a page, and its licences."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "unet3d/reports/pages/niivue"


def test_the_viewer_is_what_the_tool_makes_and_can_stand_in_a_page_without_rights():
    script = (ROOT / "tools/vendor_niivue.sh").read_text()
    version = re.search(r"^niivue=(.+)$", script, re.MULTILINE)[1]
    source = (FOLDER / "niivue.js").read_text("ascii")
    assert source.startswith(f"// NiiVue {version}, made by tools/vendor_niivue.sh\n")
    assert f'name:"@niivue/niivue",version:"{version}"' in source
    for word in ("</script", "<!--", "eval(", "new Function(", "WebAssembly", "new Worker("):
        assert word not in source, word


def test_every_part_has_its_licence():
    assert "Redistributions in binary form" in (FOLDER / "LICENSE").read_text()
    script = (ROOT / "tools/vendor_niivue.sh").read_text()
    parts = re.search(r"parts=\((.*?)\)", script, re.DOTALL)[1].split()
    sections = (FOLDER / "LICENSES-OF-PARTS.txt").read_text().split("\n==== ")[1:]
    assert [section.partition(" ====")[0] for section in sections] == parts
    assert len(parts) == 6
    for section in sections:
        assert "Permission" in section and "Copyright" in section
