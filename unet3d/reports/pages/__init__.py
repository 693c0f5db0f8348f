"""HTML pages of one file, which need no network: a training, its folds, a segmentation."""
