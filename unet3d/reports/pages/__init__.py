"""HTML pages of one file, which need no network: a training run, its folds, a segmentation."""
