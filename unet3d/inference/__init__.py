"""From the image of a scan to its segmentation, and how well that agrees with a label map."""
