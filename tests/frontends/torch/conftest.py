"""Makes the helper modules of this folder importable by its tests. Without PyTorch there is nothing to collect here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
