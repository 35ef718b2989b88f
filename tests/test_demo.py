"""`python -m kda`: the demo judges what it runs."""

import pytest
import torch

import kda
from kda.__main__ import main, worst
from kda.demo_layer import DemoLayer

TEXTS = {
    "long.txt": b"the same words, " * 9 + b"the same words come back; others do not",
    "short.txt": b"?",
    "empty.txt": b"",
}


@pytest.fixture
def files(tmp_path):
    for name, text in TEXTS.items():
        (tmp_path / name).write_bytes(text)
    return [str(tmp_path / name) for name in TEXTS]


def demo(*arguments: str) -> int:
    return main([*arguments, "--backend", "torch", "--heads", "2"])


def test_demo_is_within_tolerance_on_long_short_and_empty_prompts(files, capsys):
    assert demo(*files) == 0
    printed = capsys.readouterr().out
    for fact in (
        "long.txt: 183 tokens",
        "empty.txt: 0 tokens",
        "5.0e-03: ok",
        "tokens/s",
        "triton",
    ):
        assert fact in printed


def test_empty_prompts_alone_are_legal(files):
    assert demo(files[2], files[2]) == 0


def test_tokens_caps_all_prompts_together(files, capsys):
    assert demo(*files, "--tokens", "64") == 0
    assert "long.txt: 63 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["o", "state"])
@pytest.mark.parametrize("value", [1.5, torch.nan])
def test_a_wrong_result_fails_the_demo(files, monkeypatch, capsys, broken, value):
    right = kda.prefill

    def wrong(*args, **kwargs):
        o, state = right(*args, **kwargs)
        {"o": o[0, -1, 1], "state": state[0, 1]}[broken].mul_(value)
        return o, state

    monkeypatch.setattr(kda, "prefill", wrong)
    assert demo(files[0]) == 1
    assert "OUT OF TOLERANCE" in capsys.readouterr().out


def test_a_missing_file_is_named(files, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo(files[0], "no-such-prompt.txt")
    assert stopped.value.code == 2
    assert "no-such-prompt.txt: no such file" in capsys.readouterr().err


def test_a_backend_that_cannot_run_is_refused_with_its_reason(files, monkeypatch, capsys):
    def refuse(**call):
        raise kda.BackendError("backend 'torch' cannot run this call: it rains")

    monkeypatch.setattr(kda, "prefill", refuse)
    assert demo(files[0]) == 2
    assert "it rains" in capsys.readouterr().out


def test_error_is_measured_by_the_larger_of_a_sequence_and_its_head():
    loud = torch.ones(2, 8, 4, dtype=torch.float64)
    faint = loud * 1e-6
    off = faint + 1e-3
    assert worst([loud, off], [loud, faint]) == pytest.approx(1e-3 * 2**0.5, rel=1e-3)
    assert worst([off], [faint]) == pytest.approx(1e3, rel=1e-3)
    assert worst([loud * 0], [loud * 0]) == 0


def test_layer_is_seeded_and_sees_four_bytes_back_and_none_ahead():
    def last(text: bytes, seed: int = 0, row: int = -1):
        rows = DemoLayer(1, torch.device("cpu"), seed, hidden=32)(text)
        return torch.cat([x[row].flatten().float() for x in rows.values()])

    assert torch.equal(last(b"abcd"), last(b"abcd"))
    assert not torch.equal(last(b"abcd"), last(b"abcd", seed=1))
    torch.testing.assert_close(last(b"xabcd"), last(b"yabcd"))
    torch.testing.assert_close(last(b"abcdx", row=3), last(b"abcdy", row=3))
    assert not torch.allclose(last(b"xbcd"), last(b"ybcd"))
