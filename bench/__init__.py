"""Benchmarks of kda and its peers: `python -m bench prefill --help`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# One input generator and one error measure for tests and benchmarks: tests/cases.py, compare.py.
# By folder, as the tests find them: some installed packages bring a `tests` of their own.
if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))
