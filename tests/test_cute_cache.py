"""The cache of compiled CuTeDSL kernels: what it finds, and what many processes make of it."""

import logging
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
import torch
from cases import Case, make_inputs
from conftest import INTERPRETED

import kda
import kernels_cute
from kda import check, planner, registry, workspace
from kda.contract import Offer
from kda.prefill import bind
from kernels_cute import compile_cache, launch

why = kernels_cute.compiler_missing()
compiles = pytest.mark.skipif(
    INTERPRETED or why is not None, reason=f"no compiler, or another process's job: {why}"
)
ROOT = Path(__file__).resolve().parent.parent

# Takes the kernels from the cache, and tells whether they had to be compiled.
TAKE = """
from kernels_cute import launch
built = []
build = launch.build
launch.build = lambda: built.append(1) or build()
assert callable(launch.compiled())
print(len(built))
"""


class Made:
    """A stand-in for a compiled kernel."""

    def export_to_c(self, path, function_name):
        Path(path).write_text(function_name)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "cache"))
    compile_cache.kernel.cache_clear()
    compile_cache.origin.cache_clear()
    yield tmp_path / "cache"
    compile_cache.kernel.cache_clear()
    compile_cache.origin.cache_clear()


def take(folder):
    environment = {"KDA_CACHE_DIR": str(folder), "PATH": "", "HOME": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-c", TAKE], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@compiles
def test_eight_cold_processes_compile_once_and_a_warm_one_never(cache):
    processes = [take(cache) for _ in range(8)]
    results = [process.communicate(timeout=300) for process in processes]
    assert all(process.returncode == 0 for process in processes), results
    assert sorted(out.strip() for out, _ in results) == ["0"] * 7 + ["1"]
    assert len(list(cache.glob("call-*.o"))) == 1
    assert not list(cache.glob(".part-*"))
    out, err = take(cache).communicate(timeout=300)
    assert out.strip() == "0", err


@compiles
def test_a_cached_object_that_does_not_load_is_compiled_again(cache, caplog):
    path = compile_cache.object_path("broken")
    path.parent.mkdir(parents=True)
    for junk in (b"", b"junk" * 1000):
        path.write_bytes(junk)
        compile_cache.kernel.cache_clear()
        made = Made()
        assert compile_cache.kernel("broken", lambda made=made: made) is made
        assert path.read_text() == compile_cache.FUNCTION
    assert "compiled again" in caplog.text


def test_a_cache_that_cannot_be_written_costs_a_warning_and_no_kernel(
    tmp_path, cache, monkeypatch, caplog
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "file" / "below"))
    made = Made()
    with caplog.at_level(logging.WARNING, logger="kda"):
        assert compile_cache.kernel("call", lambda: made) is made
    assert "no cache of compiled kernels" in caplog.text


def test_a_failed_export_leaves_nothing_behind(cache, monkeypatch):
    class Broken:
        def export_to_c(self, path, function_name):
            raise RuntimeError("disk full")

    monkeypatch.setattr(compile_cache, "stored", lambda path: None)
    with pytest.raises(RuntimeError, match="disk full"):
        compile_cache.kernel("call", Broken)
    assert {p.suffix for p in cache.iterdir()} == {".lock"}


def test_an_object_belongs_to_its_name_sources_and_versions(cache, monkeypatch):
    first = compile_cache.object_path("call")
    assert first.parent == cache
    others = {compile_cache.object_path("other")}
    monkeypatch.setattr(compile_cache, "version", lambda package: "0.0")
    compile_cache.origin.cache_clear()
    others.add(compile_cache.object_path("call"))
    monkeypatch.setattr(compile_cache, "ARCH", "sm_100a")
    compile_cache.origin.cache_clear()
    others.add(compile_cache.object_path("call"))
    assert len(others) == 3
    assert first not in others


def test_the_folder_is_the_users_cache_unless_told_otherwise(monkeypatch):
    monkeypatch.delenv("KDA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert compile_cache.folder() == Path("/somewhere/kda")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert compile_cache.folder() == Path.home() / ".cache/kda"


def test_warmup_asks_for_what_a_call_launches(monkeypatch):
    asked, launched = [], []

    def kernel(*key):
        asked.append(key)
        return lambda *arguments: launched.append(arguments)

    monkeypatch.setattr(kernels_cute, "compiler_missing", lambda: None)
    monkeypatch.setattr(compile_cache, "kernel", kernel)
    monkeypatch.setattr(compile_cache, "hold", lambda name: (name, launch.build) in asked)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    kda.warmup()
    offer = Offer("cute", kernels_cute.FEATURES, None, sms=132)
    call = make_inputs(Case("one", (70, 20), "weak", H=1, HV=1))
    args, problem = check.to_problem(**bind(**call, output_final_state=True)[1])
    plan = planner.plan(problem, (offer,))
    ws = workspace.carve(plan, args.q.device)
    launch.launch(workspace.allocate_outputs(args, plan), plan, ws)
    assert len(launched) == 1
    assert len(asked) == 2
    assert asked[0] == asked[1]


def test_warmup_that_could_store_nothing_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("KDA_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(kernels_cute, "compiler_missing", lambda: None)
    monkeypatch.setattr(compile_cache, "kernel", lambda *_: None)
    monkeypatch.setattr(compile_cache, "hold", lambda *_: False)
    with pytest.raises(OSError, match=r"could not be stored in .*none"):
        kda.warmup()


def test_threads_compile_one_after_the_other(cache, monkeypatch):
    monkeypatch.setattr(compile_cache, "stored", lambda path: None)
    at_once, most = [], []

    def build():
        at_once.append(1)
        most.append(len(at_once))
        time.sleep(0.05)
        at_once.pop()
        return Made()

    stages = [Thread(target=compile_cache.kernel, args=(f"call{i}", build)) for i in range(4)]
    for thread in stages:
        thread.start()
    for thread in stages:
        thread.join()
    assert most == [1] * 4


def test_a_stored_kernel_may_be_loaded_by_other_users(cache, monkeypatch):
    monkeypatch.setattr(compile_cache, "stored", lambda path: None)
    compile_cache.kernel("call", Made)
    (made,) = cache.glob("call-*.o")
    assert made.stat().st_mode & 0o777 == 0o644


def test_a_user_without_a_home_gets_kernels_and_a_warning(cache, monkeypatch, caplog):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KDA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    made = Made()
    assert compile_cache.kernel("call", lambda: made) is made
    assert "home directory" in caplog.text


def test_sources_edited_in_mid_process_store_nothing(cache, monkeypatch):
    monkeypatch.setattr(compile_cache, "stored", lambda path: None)
    compile_cache.origin()
    monkeypatch.setattr(compile_cache, "sources", lambda: "edited")
    compile_cache.kernel("call", Made)
    assert not list(cache.glob("*.o"))


def test_warmup_without_a_compiler_or_of_another_backend_says_why(monkeypatch):
    monkeypatch.setattr(kernels_cute, "compiler_missing", lambda: "no such package")
    with pytest.raises(kda.BackendError, match="'cute' cannot compile: no such package"):
        kda.warmup()
    for other in ("triton", "torch", "auto"):
        with pytest.raises(ValueError, match=f"got '{other}'"):
            registry.warmup(other)


def test_the_launcher_has_the_entries_of_the_protocol_without_a_compiler():
    for stage in ("prepare", "scan", "merge", "recurrence", "launch", "warmup"):
        assert callable(getattr(launch, stage))
