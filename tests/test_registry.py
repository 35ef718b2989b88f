"""A backend that cannot run is a reason, and our own errors are never taken for one."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import PackageNotFoundError
from textwrap import dedent

import pytest
import torch

import kda
import kernels_cute
import kernels_triton
from kda import planner, registry, tuning
from kda.contract import Device, Feature, Offer, Problem

H200 = Device("cuda", 0, "NVIDIA H200", (9, 0), 132)
A100 = Device("cuda", 0, "NVIDIA A100", (8, 0), 108)
CPU = Device("cpu", 0, "cpu", (0, 0), 2)
XPU = Device("xpu", 0, "xpu", (0, 0), 1)
KERNELS = ["cute", "triton"]
TRITON_OFFER = Offer("triton", frozenset(Feature), None)
DENSE = Problem(1, 64, 2, 2, 1, False, (64,), frozenset({Feature.GATE_BOUNDED}))


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No cached probe, nothing reported yet, and no user's environment."""
    registry.offer.cache_clear()
    monkeypatch.setattr(registry, "_reported", set())
    monkeypatch.delenv("KDA_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    yield
    registry.offer.cache_clear()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Makes an importable package of the given source."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(source: str, name: str = "kda_test_package") -> str:
        (tmp_path / f"{name}.py").write_text(dedent(source))
        made.append(name)
        return name

    yield make
    for name in made:
        sys.modules.pop(name, None)


def names(offers) -> list[str]:
    return [offer.backend for offer in offers]


@pytest.mark.parametrize(
    ("device", "expected"),
    [(H200, KERNELS), (A100, KERNELS), (CPU, ["torch"]), (XPU, KERNELS)],
)
def test_auto_never_offers_torch_for_a_gpu_nor_kernels_for_the_cpu(device, expected):
    assert names(registry.offers("auto", device)) == expected


@pytest.mark.parametrize("backend", registry.BACKENDS)
@pytest.mark.parametrize("device", [H200, CPU])
@pytest.mark.parametrize("environment", ["", "torch", "nonsense"])
def test_an_explicit_backend_is_the_only_offer_whatever_the_environment_says(
    backend, device, environment, monkeypatch
):
    monkeypatch.setenv("KDA_BACKEND", environment)
    assert names(registry.offers(backend, device)) == [backend]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [("torch", ["torch"]), ("triton", ["triton"]), ("auto", ["cute", "triton"]), ("", None)],
)
def test_the_environment_replaces_auto(environment, expected, monkeypatch):
    usual = names(registry.offers("auto", H200))
    monkeypatch.setenv("KDA_BACKEND", environment)
    assert names(registry.offers("auto", H200)) == (expected or usual)


def test_an_unknown_backend_is_refused_with_the_known_ones(monkeypatch):
    for unknown in ("fla", "", "Torch", "cuda"):
        with pytest.raises(ValueError, match=f"'torch', got {unknown!r}"):
            registry.offers(unknown, CPU)
    monkeypatch.setenv("KDA_BACKEND", "fla")
    with pytest.raises(ValueError, match=r"'auto', 'cute', 'triton', 'torch', got 'fla'"):
        registry.offers("auto", CPU)


def test_an_explicit_backend_that_cannot_run_raises_its_reason_and_never_falls_back():
    with pytest.raises(kda.BackendError, match="'cute' cannot run this call: it is built for Hop"):
        planner.plan(DENSE, registry.offers("cute", A100))
    with pytest.raises(kda.BackendError, match="'triton' cannot run this call: it needs CUDA"):
        planner.plan(DENSE, registry.offers("triton", CPU))


def test_auto_without_a_taker_lists_every_reason_and_the_slow_way_out():
    with pytest.raises(kda.BackendError) as caught:
        planner.plan(DENSE, registry.offers("auto", A100))
    for words in ("cute: ", "triton: it is built for Hopper", "8.0", 'backend="torch"', "slow"):
        assert words in str(caught.value)


def test_every_backend_is_listed_with_its_reason():
    offers = kda.backends()
    assert names(offers) == list(registry.BACKENDS)
    for offer in offers:
        assert offer.features <= frozenset(Feature)
        assert offer.reason is None or offer.reason.strip()
    assert registry.offer("torch", CPU).reason is None
    whole = frozenset(Feature) - {Feature.SEGMENTS}
    assert registry.offer("torch", CPU).features == whole, "torch computes any call"


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (A100, ["Hopper", "9.0", "NVIDIA A100 has 8.0"]),
        (H200._replace(capability=(10, 0), name="B200"), ["Hopper", "B200 has 10.0"]),
        (CPU, ["CUDA tensors", "TRITON_INTERPRET=1"]),
        (XPU, ["CUDA tensors", "not xpu"]),
    ],
)
def test_triton_says_why_a_device_will_not_do(device, words):
    why = kernels_triton.available(device)
    assert why is not None
    assert all(word in why for word in words), why


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (A100, ["Hopper", "9.0", "NVIDIA A100 has 8.0"]),
        (CPU, ["CUDA tensors", "not cpu"]),
        (XPU, ["CUDA tensors", "not xpu"]),
    ],
)
def test_cute_says_why_a_device_will_not_do(device, words):
    why = kernels_cute.available(device)
    assert why is not None
    assert all(word in why for word in words), why


@pytest.fixture
def installed(monkeypatch):
    """Pretends that packages of these versions are installed and can be imported."""

    def pretend(**versions: str) -> None:
        def version(package: str) -> str:
            found = versions.get(package.replace("-", "_"))
            if found is None:
                raise PackageNotFoundError(package)
            return found

        monkeypatch.setattr(kernels_cute, "version", version)
        monkeypatch.setattr(kernels_cute, "import_failure", lambda package: None)

    return pretend


def test_cute_names_the_package_that_is_missing(installed):
    installed()
    assert kernels_cute.available(H200).startswith("nvidia-cutlass-dsl is not installed")
    installed(nvidia_cutlass_dsl="4.6.2")
    assert kernels_cute.available(H200).startswith("apache-tvm-ffi is not installed")
    installed(nvidia_cutlass_dsl="4.6.2", apache_tvm_ffi="0.1")
    assert kernels_cute.available(H200) is None


@pytest.mark.parametrize("found", ["4.5.3", "4.6.1", "4.9.0.dev0", "5.0"])
def test_a_cutlass_dsl_outside_the_tested_range_is_a_reason_with_range_and_version(
    found, installed
):
    installed(nvidia_cutlass_dsl=found, apache_tvm_ffi="0.1")
    why = kernels_cute.available(H200)
    assert why == f"it was tested with nvidia-cutlass-dsl >= 4.6.2, < 4.9, found {found}"


def test_a_cutlass_dsl_that_does_not_import_is_a_reason(monkeypatch, installed):
    installed(nvidia_cutlass_dsl="4.8.2", apache_tvm_ffi="0.1")
    monkeypatch.setattr(kernels_cute, "import_failure", registry.import_failure)
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    assert kernels_cute.available(H200).startswith("importing tvm_ffi failed: ModuleNotFound")


def test_auto_leaves_short_sequences_to_the_backend_that_is_faster_there(monkeypatch):
    monkeypatch.setattr(kernels_cute, "available", lambda device: None)
    cute = registry.offers("cute", H200)[0]
    least = tuning.AUTO_MIN_LEN["cute"]
    for T, backend in ((least, "cute"), (least - 1, "triton")):
        problem = DENSE._replace(T=T, seq_lens=(T,))
        plan = planner.plan(problem, (cute, TRITON_OFFER))
        assert plan.backend == backend
    why = f"it is slower for sequences of typically fewer than {least} tokens"
    assert plan.rejected == (("cute", why),)
    broken = TRITON_OFFER._replace(reason="broken")
    assert planner.plan(problem, (cute, broken)).backend == "cute", "nobody else can"
    assert planner.plan(problem, (cute,)).backend == "cute", "as asked"


def test_what_cute_does_not_declare_falls_to_triton_with_its_reason(monkeypatch):
    monkeypatch.setattr(tuning, "AUTO_MIN_LEN", {})
    monkeypatch.setattr(kernels_cute, "available", lambda device: None)
    cute = registry.offers("auto", H200)[0]
    assert planner.plan(DENSE, (cute, TRITON_OFFER)).backend == "cute"
    for lacking in sorted(frozenset(Feature) - kernels_cute.FEATURES, key=lambda f: f.name):
        problem = DENSE._replace(features=DENSE.features | {lacking})
        plan = planner.plan(problem, (cute, TRITON_OFFER))
        assert plan.backend == "triton"
        assert plan.rejected == (("cute", f"it does not support {lacking.value}"),)


def test_an_old_triton_is_a_reason_that_has_both_versions(monkeypatch):
    fake = type(sys)("triton")
    monkeypatch.setitem(sys.modules, "triton", fake)
    for version, too_old in [("3.5.1", True), ("2.9.0", True), ("3.6.0", False), ("3.10.0", False)]:
        monkeypatch.setattr(fake, "__version__", version, raising=False)
        why = kernels_triton.available(H200)
        assert (why is not None) is too_old
        assert why is None or why == "it needs Triton >= 3.6, found " + version[:3]
    for version in ("main", ""):
        monkeypatch.setattr(fake, "__version__", version)
        assert "broken install" in kernels_triton.available(H200)


def test_a_missing_optional_package_is_a_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(kernels_cute, "available", lambda device: "not here")
    why = registry.offer("triton", H200).reason
    assert why is not None
    assert why.startswith("importing triton failed: ModuleNotFoundError")
    with pytest.raises(kda.BackendError, match="triton: importing triton failed"):
        planner.plan(DENSE, registry.offers("auto", H200))


@pytest.mark.parametrize(
    "source",
    [
        "import kda_test_no_such_module",
        "from sys import kda_test_no_such_name",
        "import sys; sys.kda_test_no_such_attribute",
        "raise OSError('libcuda.so.1: cannot open shared object file')",
        "raise RuntimeError('no driver')",
        "raise AssertionError('driver too old')",
        "{}['sm_90']",
        "int('3.9rc1')",
        "len(3)",
        "undefined_name",
        "def f(:",
    ],
)
def test_a_broken_optional_package_is_a_reason_that_names_the_error(source, package):
    name = package(source)
    why = registry.import_failure(name)
    assert why is not None
    assert why.startswith(f"importing {name} failed: ")
    assert "Error: " in why


def test_a_package_that_imports_is_no_failure(package):
    assert registry.import_failure(package("x = 1")) is None


@pytest.mark.parametrize("error", ["ImportError", "ModuleNotFoundError", "AttributeError"])
def test_an_error_in_our_own_modules_is_raised_and_not_made_a_reason(error, package, monkeypatch):
    name = package(f"raise {error}('ours')")
    monkeypatch.setitem(registry.BACKENDS, "triton", (name, name))
    with pytest.raises(getattr(__import__("builtins"), error), match="ours"):
        registry.offers("auto", H200)
    with pytest.raises(getattr(__import__("builtins"), error), match="ours"):
        registry.load("triton")


def test_a_backend_module_has_the_three_entries_of_the_protocol():
    torch_backend = registry.load("torch")
    for stage in ("prepare", "recurrence", "launch"):
        assert callable(getattr(torch_backend, stage))


def test_each_choice_and_each_new_rejection_is_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="kda")
    offers = registry.offers("cute", A100) + registry.offers("torch", CPU)
    plan = planner.plan(DENSE, offers)
    for _ in range(3):
        registry.report((*plan.rejected, (plan.backend, "chosen")))
    first = ["backend cute: it is built for Hopper", "backend torch: chosen"]
    assert len(caplog.messages) == 2
    assert all(m.startswith(f) for m, f in zip(caplog.messages, first, strict=True))
    registry.report((*plan.rejected, ("triton", "new reason"), (plan.backend, "chosen")))
    assert caplog.messages[2:] == ["backend triton: new reason"]
    assert {(r.name, r.levelname) for r in caplog.records} == {("kda", "INFO")}


def test_a_probe_runs_once_a_device(monkeypatch):
    calls = []
    monkeypatch.setattr(kernels_triton, "available", calls.append)
    for _ in range(3):
        registry.offers("triton", H200)
        registry.offers("triton", A100)
    assert calls == [H200, A100]


def test_meta_tensors_are_refused_before_anything_is_allocated():
    meta = torch.empty(1, 16, 1, 128, dtype=torch.bfloat16, device="meta")
    out = torch.empty_like(meta)
    with pytest.raises(kda.BackendError, match="meta tensors hold no values"):
        kda.prefill(*[meta] * 4, meta[..., 0], lower_bound=-5.0, out=out, backend="torch")
