"""What files hold: images as lazy arrays with a geometry, and label maps.

``image.open_image`` opens a file of any format: ``nifti``, ``nrrd`` and ``metaimage``, ``dicom``. A
format is a function that returns a ``source.Source``.
"""
