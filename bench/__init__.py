"""Benchmarks of kda and its peers: `python -m bench --help`."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if find_spec("pandas") is None:
    raise ImportError("bench needs pandas: pip install '.[bench]' in kda's checkout")

# One input generator and one error measure for tests and benchmarks: tests/cases.py, compare.py.
# By folder, as the tests find them: some installed packages bring a `tests` of their own.
# KDA_TREE: the tree whose `kda` is measured with this tree's benchmark (`--base`).
for folder in (str(ROOT / "tests"), os.environ.get("KDA_TREE", "")):
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
