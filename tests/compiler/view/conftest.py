"""Lets the tests of this folder import the programs beside them and in the folder above."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1])]
