"""Lets the tests of this folder import programs of others: pytest's importlib mode adds no folder to the path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE.parent), str(HERE.parent / "quantization")]
