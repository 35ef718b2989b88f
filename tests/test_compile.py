"""Every Triton and Gluon variant that a plan can name compiles for sm_90, without a GPU."""

import re

import pytest
import torch
from cases import BF16, FP32, Case, make_inputs
from conftest import INTERPRETED, SHIPPED
from sm90 import compiling, sass

from kda import check, planner, workspace
from kda.contract import HEAD_DIM, Feature, Offer
from kda.prefill import bind
from kernels_triton import FEATURES, GLUON_FEATURES, launch

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")

VARIANTS = [x for x in SHIPPED if x.backend == "triton"]
OFFERS = (Offer("triton", FEATURES, None, gluon=GLUON_FEATURES, sms=132),)

# Between them every feature, dense and packed, all state combinations and dtypes, with and without
# the optional parameters.
CALLS = {
    "packed": Case("packed", (70, 0, 33), H=1, HV=2),
    "dense": Case("dense", (70, 70), packed=False, state_dtype=None),
    "bare": Case(
        "bare", (70,), state_dtype=BF16, cu_dtype=torch.int32,
        flags=(
            ("A_log", None), ("dt_bias", None), ("use_qk_l2norm_in_kernel", False),
            ("state_v_first", False),
        ),
    ),
    "softplus": Case("softplus", (70,), "soft"),
    "given_bounded": Case("given_bounded", (70,), "weak", computed=True, g_dtype=FP32),
    "given": Case("given", (70,), "soft", computed=True),
    "neg_eigval": Case("neg_eigval", (70,), flags=(("allow_neg_eigval", True),)),
    "given_beta": Case("given_beta", (70,), flags=(("use_beta_sigmoid_in_kernel", False),)),
    "segments": Case("segments", (300, 0, 600), flags=(("use_intracard_cp", True),)),
    "dense_segments": Case(
        "dense_segments", (1200, 1200), packed=False, state_dtype=None,
        flags=(("use_intracard_cp", True),),
    ),
}  # fmt: skip


def problem_of(call):
    return check.to_problem(**bind(**make_inputs(CALLS[call]))[1])[1]


def test_the_calls_have_every_feature_between_them():
    assert frozenset().union(*(problem_of(call).features for call in CALLS)) == set(Feature)


def compile_call(shipped, call, final_state, force):
    force(shipped)
    _, keywords = bind(**make_inputs(call), output_final_state=final_state)
    args, problem = check.to_problem(**keywords)
    plan = planner.plan(problem, OFFERS)
    assert plan.variant == shipped.variant
    with compiling() as kernels:
        ws = workspace.carve(plan, args.q.device)
        launch.launch(workspace.allocate_outputs(args, plan), plan, ws)
    return kernels


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_variant_compiles_for_every_kind_of_call_without_spilling(variant, call, force, tmp_path):
    if not planner.runs(variant.variant, problem_of(call), *OFFERS):
        pytest.skip("no plan pairs them")
    kernels = compile_call(variant, CALLS[call], call != "dense", force)
    assert len(kernels) == (4 if "segments" in call else 2)
    # a few saved registers outside the loops are harmless; spilled accumulators take 500 bytes up
    assert max(sass(kernel.asm["cubin"], tmp_path).stack for kernel in kernels) <= 96


@pytest.mark.parametrize("variant", [x for x in VARIANTS if x.variant.gluon], ids=str)
def test_the_recurrence_waits_for_its_products_only_where_the_source_does(variant, force, tmp_path):
    _, recurrence = compile_call(variant, CALLS["packed"], True, force)
    found = sass(recurrence.asm["cubin"], tmp_path)
    assert found.wgmma == 24  # 8 + 8 for x and o, 4 + 4 for the state and o, 64 tokens a step
    assert found.wgmma_waits == 3


@pytest.mark.parametrize("variant", [x for x in VARIANTS if x.variant.gluon], ids=str)
def test_the_prescan_waits_for_its_products_only_where_the_source_does(variant, force, tmp_path):
    _, scan, _, _ = compile_call(variant, CALLS["segments"], True, force)
    found = sass(scan.asm["cubin"], tmp_path)
    assert found.wgmma == 12  # 8 for x, 4 for the state
    assert found.wgmma_waits == 2


@pytest.mark.parametrize("variant", [x for x in VARIANTS if x.variant.gluon], ids=str)
def test_prepare_invalidates_its_barriers_before_their_memory_could_serve_again(variant, force):
    prepare, _ = compile_call(variant, CALLS["packed"], True, force)
    ptx = prepare.asm["ptx"]
    made = re.findall(r"mbarrier\.init\S+ \[(\S+)\]", ptx)
    assert len(made) == 2
    assert re.findall(r"mbarrier\.inval\S+ \[(\S+)\]", ptx) == made
    last_store = ptx.rindex("cp.async.bulk.tensor.2d.global")
    assert ptx.index("mbarrier.inval") > last_store


@pytest.mark.parametrize("call", ["dense", "packed", "dense_segments", "segments"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_stage_that_starts_early_waits_before_it_touches_what_an_earlier_one_does(
    variant, call, force, tmp_path
):
    prepare, *later = compile_call(variant, CALLS[call], True, force)
    found = global_memory(prepare, tmp_path)
    gluon = variant.variant.gluon
    assert (found[0] == "PREEXIT") == gluon  # what lets the next stage start
    assert "ACQBULK" not in found
    assert not prepare.metadata.launch_pdl  # it starts after all earlier work of the stream
    offsets = {"LDG"} if "dense" not in call else set()  # nothing else is read before a wait
    for kernel in later:
        alone = gluon and variant.variant.v_block == HEAD_DIM and kernel is later[-1]
        early = alone or kernel.name == "merge_kernel"
        assert kernel.metadata.launch_pdl == early
        found = global_memory(kernel, tmp_path)
        assert found.count("PREEXIT") == (kernel is not later[-1])
        if not early:
            continue
        before, *roles = " ".join(x for x in found if x != "PREEXIT").split("ACQBULK")
        assert set(before.split()) <= offsets
        if "segments" in call and kernel is later[-1]:
            # a program without a segment leaves and has touched no more than offsets
            roles.remove(next(role for role in roles if set(role.split()) <= offsets))
        if "ttg.warp_specialize" in kernel.asm["ttgir"]:
            # the warp that loads has code of its own, before or after that of the others
            loads, *roles = sorted(roles, key=lambda role: "UTMALDG" not in role)
            assert {"UTMALDG"} <= set(loads.split()) <= {"UTMALDG"} | offsets
            assert "UTMALDG" not in roles[0]
        assert len(roles) == 1
        assert "STG" in roles[0]


def global_memory(kernel, folder) -> list[str]:
    """The instructions that touch it, wait for an earlier kernel or let a later one start, in the
    order of the code."""
    code = sass(kernel.asm["cubin"], folder).code
    names = "ACQBULK PREEXIT UTMALDG UTMASTG LDGSTS LDG STG ATOMG RED"
    return re.findall(rf"\b({'|'.join(names.split())})\b", code)
