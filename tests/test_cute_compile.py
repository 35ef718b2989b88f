"""Every CuTeDSL kernel that a plan can launch compiles for sm_90a without a GPU, into machine code
that keeps what the source intends."""

import inspect
import re

import pytest
from conftest import INTERPRETED
from sm90 import ptxas_notes, sass_of_each

import kernels_cute
from kda import tuning
from kda.contract import Plan
from kernels_cute import compile_cache, interface, launch

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="the interpreter is Triton's"),
    pytest.mark.skipif(
        (why := kernels_cute.compiler_missing()) is not None, reason=f"no compiler: {why}"
    ),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What `warmup` asks the cache for."""
    folder = tmp_path_factory.mktemp("dump")
    found = []
    with pytest.MonkeyPatch.context() as patch:
        options = f"{launch.OPTIONS} --keep-ptx --keep-cubin --dump-dir={folder}"
        patch.setattr(launch, "OPTIONS", options)
        patch.setattr(compile_cache, "kernel", lambda name, build: found.append(build()))
        patch.setattr(compile_cache, "hold", lambda *_: True)
        launch.warmup()
    (kernels,) = found
    return kernels


@pytest.fixture(scope="module")
def machine_code(compiled, tmp_path_factory):
    """[(stage, machine code)]"""
    each = sass_of_each(compiled.__cubin__, tmp_path_factory.mktemp("sass"))
    return [(re.search(r"kernels_cute([a-z]+)", name)[1], code) for name, code in each]


def test_a_handful_of_kernels_serves_every_call(machine_code):
    stages = ["merge", "prepare", *["recurrence"] * len(interface.VARIANTS), "scan"]
    assert sorted(stage for stage, _ in machine_code) == stages


def test_a_call_takes_the_sizes_of_a_plan_in_its_order():
    from kernels_cute.call import Call

    names = list(inspect.signature(Call.__call__).parameters)
    at = names.index("B")
    assert tuple(names[at : names.index("flags")]) == Plan._fields[launch.SIZES]


def test_every_planned_variant_is_compiled():
    planned = {(r.variant.v_block, r.variant.recurrence_stages) for r in tuning.RULES["cute"]}
    assert planned == set(interface.VARIANTS)


def test_no_kernel_spills(machine_code):
    assert [(stage, code.stack) for stage, code in machine_code if code.stack] == []


def test_one_thread_issues_each_copy(machine_code):
    """Where ptxas gives up uniform registers it loops over the threads of every TMA copy."""
    assert [(stage, n.thread_loops) for stage, n in machine_code if n.thread_loops] == []
    assert {stage for stage, code in machine_code if code.tma_loads} == {
        *("prepare", "scan", "recurrence")
    }


def test_a_stage_that_starts_early_waits_before_it_touches_what_an_earlier_one_does(machine_code):
    """SASS calls it ACQBULK, and PREEXIT what lets the next stage in."""
    for stage, sass in machine_code:
        before, wait, after = sass.code.partition("ACQBULK")
        assert sass.code.count("ACQBULK") == (stage in ("merge", "recurrence"))
        assert ("PREEXIT" in sass.code) == (stage != "recurrence")
        if wait:
            touched = re.findall(r"\b(?:LDG|LD\.|STG?\.|ATOM|RED\.|UTMA|UBLKCP)\S*", before)
            assert set(touched) == {"LDG.E"}  # offsets, in 32-bit words
            assert re.search(r"\b(UTMALDG|LDG\.E\.128)", after)


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
    found = [code for name, code in machine_code if name == stage]
    assert found
    for code in found:
        assert (code.wgmma, code.wgmma_waits) == (products, waits)


def test_ptxas_serialises_no_products(compiled, tmp_path):
    assert not re.findall(r"C751[01]", ptxas_notes(compiled.__ptx__, tmp_path))


def test_prepare_leaves_room_for_three_programs_an_sm(compiled):
    prepare = compiled.__ptx__[
        re.search(r"\.entry \w*kernels_cuteprepare", compiled.__ptx__).start() :
    ]
    assert f".minnctapersm {interface.PREPARE_PROGRAMS_PER_SM}" in prepare[: prepare.index("{")]
    shared_of_an_sm, reserved = 233472, 1024
    from kernels_cute.layouts import SHARED

    assert interface.PREPARE_PROGRAMS_PER_SM * (SHARED + reserved) <= shared_of_an_sm
