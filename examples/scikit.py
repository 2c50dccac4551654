"""Images that come with scikit-learn. Where it is not installed, an example ends with the command that installs it."""

from __future__ import annotations

import sys

try:
    from sklearn.datasets import load_digits, load_sample_image
except ImportError:
    sys.exit("this example takes its images from scikit-learn: pip install scikit-learn")

__all__ = ["load_digits", "load_sample_image"]
