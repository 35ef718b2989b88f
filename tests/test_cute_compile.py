"""Every CuTeDSL kernel that a plan can launch compiles for sm_90a without a GPU, into machine code
that keeps what the source intends."""

import re

import pytest
from conftest import INTERPRETED
from sm90 import ptxas_notes, sass

import kernels_cute
from kda import tuning
from kernels_cute import compile_cache, interface, launch

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter is Triton's"),
    pytest.mark.skipif(
        (why := kernels_cute.compiler_missing()) is not None, reason=f"no compiler: {why}"
    ),
]

VARIANTS = [rule.variant for rule in tuning.RULES["cute"]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """{(stage, config): compiled kernel} of all that `warmup` asks the cache for."""
    folder = tmp_path_factory.mktemp("dump")
    found = {}

    def make(stage, config, build):
        if (stage, config) not in found:
            found[stage, config] = build(config)

    with pytest.MonkeyPatch.context() as patch:
        options = f"{launch.OPTIONS} --keep-ptx --keep-cubin --dump-dir={folder}"
        patch.setattr(launch, "OPTIONS", options)
        patch.setattr(compile_cache, "kernel", make)
        patch.setattr(compile_cache, "hold", lambda *_: True)
        launch.warmup(VARIANTS)
    return found


@pytest.fixture(scope="module")
def machine_code(compiled, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sass")
    return {key: sass(kernel.__cubin__, folder) for key, kernel in compiled.items()}


def test_a_handful_of_kernels_serves_every_call(compiled):
    assert {stage for stage, _ in compiled} == {"prepare", "scan", "merge", "recurrence"}
    assert len(compiled) <= 6


def test_no_kernel_spills(machine_code):
    assert {key: code.stack for key, code in machine_code.items() if code.stack} == {}


def test_one_thread_issues_each_copy(machine_code):
    """Where ptxas gives up uniform registers it loops over the threads of every TMA copy."""
    assert {key: n.thread_loops for key, n in machine_code.items() if n.thread_loops} == {}
    loads = {stage: code.tma_loads for (stage, _), code in machine_code.items()}
    assert all(loads[stage] for stage in ("prepare", "scan", "recurrence"))


@pytest.mark.parametrize(
    ("stage", "products", "waits"),
    [
        # 8 and 8 of L and M, 8 and 8 against the first half, 4 of kr' and 4 of M'
        ("prepare", 40, 2),
        # two steps: 8 for x, 4 for the state
        ("scan", 24, 4),
        # two steps: 8 and 8 for x and o, 4 and 4 for the state and o
        ("recurrence", 48, 5),
    ],
)
def test_products_are_waited_for_only_where_the_source_does(stage, products, waits, machine_code):
    found = [code for (name, _), code in machine_code.items() if name == stage]
    assert found
    for code in found:
        assert (code.wgmma, code.wgmma_waits) == (products, waits)


def test_ptxas_serialises_no_products(compiled, tmp_path):
    for kernel in compiled.values():
        assert not re.findall(r"C751[01]", ptxas_notes(kernel.__ptx__, tmp_path))


def test_prepare_leaves_room_for_three_programs_an_sm(compiled, machine_code):
    (ptx,) = [k.__ptx__ for (stage, _), k in compiled.items() if stage == "prepare"]
    assert f".minnctapersm {interface.PREPARE_PROGRAMS_PER_SM}" in ptx
    shared_of_an_sm, reserved = 233472, 1024
    from kernels_cute.layouts import SHARED

    assert interface.PREPARE_PROGRAMS_PER_SM * (SHARED + reserved) <= shared_of_an_sm
