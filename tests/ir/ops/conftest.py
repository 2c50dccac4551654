"""Lets these tests import the evaluator beside them: pytest's importlib mode adds no folder to the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
