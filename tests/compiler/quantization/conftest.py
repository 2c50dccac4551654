"""Lets the tests of this folder import the programs beside them: pytest's importlib mode adds no folder to the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))
