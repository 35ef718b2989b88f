"""The rules of this tree that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kernels_cute

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("kda", "kernels_triton", "kernels_cute")
OURS = (*PRODUCT, "tests", "bench")
LIMITS = {"kda": 250, "kernels_triton": 400, "kernels_cute": 600}
OPTIONAL = {"triton", "cutlass", "cuda", "tvm_ffi", "fla"}

FORBIDDEN_IMPORTS = {  # folder -> top-level packages that no line of it may import
    "kda": {"tests", "bench", "fla"},
    "kernels_triton": {"kernels_cute", "cutlass", "tests", "bench", "fla"},
    "kernels_cute": {"kernels_triton", "triton", "tests", "bench", "fla"},
}


def sources(*folders: str) -> list[Path]:
    return sorted(f for folder in folders for f in (ROOT / folder).rglob("*.py"))


def of_each(files: list[Path]):
    return pytest.mark.parametrize("file", files, ids=lambda f: str(f.relative_to(ROOT)))


def imports(nodes) -> set[str]:
    """Top-level packages that the import statements among `nodes` name."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


def run_at_import(tree: ast.AST) -> list[ast.AST]:
    """The nodes that run when the module is imported: none inside functions or TYPE_CHECKING."""
    nodes, queue = [], [tree]
    while queue:
        node = queue.pop()
        nodes.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            queue += node.orelse
            continue
        queue += ast.iter_child_nodes(node)
    return nodes


def parse(file: Path) -> ast.AST:
    return ast.parse(file.read_text(), str(file))


def test_importing_planning_and_listing_backends_loads_no_kernel_language():
    code = f"""
import sys, torch
before = set(sys.modules)  # torch imports cuda, where it is installed
import kda, kda.portable, kernels_triton, kernels_cute
kda.backends()
kda.workspace_size(64, 2, backend="torch")
print(sorted({OPTIONAL} & (set(sys.modules) - before)))
"""
    command = [sys.executable, "-c", code]
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment
    )
    assert done.stdout.strip() == "[]"


@of_each(sources("kda") + [ROOT / f / "__init__.py" for f in ("kernels_triton", "kernels_cute")])
def test_no_optional_package_is_imported_with_the_module(file):
    assert not imports(run_at_import(parse(file))) & OPTIONAL


@of_each(sources(*PRODUCT))
def test_a_folder_imports_nothing_that_its_wall_keeps_out(file):
    folder = file.relative_to(ROOT).parts[0]
    assert not imports(ast.walk(parse(file))) & FORBIDDEN_IMPORTS[folder]


@of_each(sources(*PRODUCT))
def test_a_file_of_the_product_stays_short(file):
    lines = len(file.read_text().splitlines())
    assert lines <= LIMITS[file.relative_to(ROOT).parts[0]]


@of_each(sources(*OURS))
def test_no_handler_catches_everything(file):
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.ExceptHandler):
            caught = {"everything"} if node.type is None else set()
            caught |= {n.id for n in ast.walk(node.type or node) if isinstance(n, ast.Name)}
            wide = caught & {"everything", "Exception", "BaseException"}
            assert not wide, f"line {node.lineno} catches {wide}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            wide = {ast.unparse(a) for a in node.args} & {"Exception", "BaseException"}
            assert not wide, f"line {node.lineno} suppresses {wide}"


@of_each(sources(*OURS))
def test_no_comment_is_a_banner(file):
    for number, line in enumerate(file.read_text().splitlines(), 1):
        assert not re.match(r"\s*#.*([-=#*~_])\1{3}", line), f"line {number}: {line}"


@of_each(sources("kda", "kernels_triton", "kernels_cute"))
def test_no_kernel_is_tuned_behind_the_plans_back(file):
    names = {n.attr for n in ast.walk(parse(file)) if isinstance(n, ast.Attribute)}
    assert not names & {"autotune", "heuristics"}


def test_the_environment_variable_for_the_backend_is_read_in_one_file():
    reading = {
        file.name
        for file in sources(*PRODUCT)
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Call | ast.Subscript)
        and "environ" in ast.unparse(node)
        and "KDA_BACKEND" in ast.unparse(node)
    }
    assert reading == {"registry.py"}


def test_the_wheel_holds_the_product_and_nothing_else():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["packages"] == list(PRODUCT)
    for package in PRODUCT:
        subfolders = {f.parent for f in sources(package)} - {ROOT / package}
        assert not subfolders, "a subpackage would be missing from the wheel"


def test_the_range_of_cutlass_dsl_is_the_one_that_is_installed_and_tested():
    oldest, before = (
        ".".join(map(str, v)) for v in (kernels_cute.OLDEST_DSL, kernels_cute.BEFORE_DSL)
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (dsl, _) = project["optional-dependencies"]["cute"]
    assert dsl.startswith(f"nvidia-cutlass-dsl>={oldest},<{before};")
    # with another one the tests of the kernels would be skipped there
    assert f"'nvidia-cutlass-dsl=={oldest}'" in (ROOT / "Makefile").read_text()


def documents() -> list[Path]:
    return sorted(ROOT.glob("*.md"))


def code_in(text: str) -> list[str]:
    """What stands in backticks, and the lines of fenced blocks."""
    fences = re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return inline + [line for block in fences for line in block.splitlines()]


def named_paths(text: str) -> set[str]:
    """Words in code that look like paths of this repository: a known folder or a file's ending."""
    words = {w.strip("\"'(),:;") for code in code_in(text) for w in code.split()}
    found = set()
    for word in (w.split("::")[0].removeprefix("./") for w in words):
        if re.search(r"[<>{}=$@]|://|^[~/]|^\.\./|YYYY", word):
            continue  # a placeholder, an option, an address, or a path outside
        first, *rest = word.split("/")
        ours = rest and first in (*OURS, ".ci")
        if ours or re.fullmatch(r"[\w./*-]+\.(py|md|toml|json|yaml|yml|cfg)", word):
            found.add(word)
    return found


@of_each(documents())
def test_a_path_that_a_document_names_exists(file):
    missing = {p for p in named_paths(file.read_text()) if not any(ROOT.glob(p.rstrip("/")))}
    assert not missing


@of_each(documents())
def test_a_make_target_that_a_document_names_exists(file):
    wanted = {
        target
        for code in code_in(file.read_text())
        for target in re.findall(r"(?:^|&& )make ([\w-]+)", code)
    }
    makefile = (ROOT / "Makefile").read_text() if wanted else ""
    targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
    assert wanted <= targets


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("", set()),
        ("see `kda/check.py` and `bench/results/`", {"kda/check.py", "bench/results/"}),
        ("`kda/nope.py::rule`", {"kda/nope.py"}),
        ("```sh\npython kda/nope.py --x=1\n```", {"kda/nope.py"}),
        ("`README.md`, `tests/test_*.py`", {"README.md", "tests/test_*.py"}),
        ("`bench/results/YYYY-MM-DD.json` `../shared/x.md` `https://a.b/c.py`", set()),
        ("`moonshot/FlashKDA` `q / k` `1/2` `kda.prefill` kda/plain.py", set()),
    ],
)
def test_paths_are_found_in_code_and_only_there(text, paths):
    assert named_paths(text) == paths
