"""What files hold: images as lazy arrays with a geometry, and label maps.

``image.open_image`` opens a file of any format. A format is a module of this folder and a line of
the table in ``files``.
"""

import sys
from typing import Any

if "nibabel" not in sys.modules and "pydicom" not in sys.modules:
    # nibabel imports pydicom, in a seventh of a second, for DICOM in the headers of NIfTI files,
    # which nobody reads here.
    modules: dict[str, Any] = sys.modules
    modules["pydicom"] = None
    try:
        import nibabel as nibabel
    finally:
        del modules["pydicom"]
