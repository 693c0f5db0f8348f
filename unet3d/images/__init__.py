"""Reads images as lazy arrays with a geometry, and reads and writes label maps.

``image.open_image`` opens a file of any format. A format is a module in this folder and a line of
the table in ``files``.
"""

import sys
from typing import Any

if "nibabel" not in sys.modules and "pydicom" not in sys.modules:
    # nibabel imports pydicom, which takes 0.14 s, for DICOM data in NIfTI headers, which is not
    # used here.
    modules: dict[str, Any] = sys.modules
    modules["pydicom"] = None
    try:
        import nibabel as nibabel
    finally:
        del modules["pydicom"]
