"""Text from a trained model."""

import pytest

from scripts import sample


def test_sample_prints_text_that_goes_on_from_the_prompt(train, call, capsys):
    run = train("run", "configs/ssmax.py")
    capsys.readouterr()
    arguments = ("--prompt", "abc", "--max_new_tokens", 40, "--num_samples", 2)
    call(sample, run, *arguments)
    first = capsys.readouterr().out
    assert first.count("abc") >= 2 and first.count("-" * 80) == 2
    # two samples, end-of-text and the prompt and 40 tokens, 2 layers, keys and values, float32
    assert first.endswith(f"cache: {2 * 44 * 2 * 2 * 32 * 4:,} bytes for 2 x 44 positions\n")
    call(sample, run, *arguments)
    assert capsys.readouterr().out == first
    call(sample, run, *arguments, "--seed", 7)
    assert capsys.readouterr().out != first


@pytest.mark.parametrize("arguments", [["--max_new_tokens", "0"], ["--top_k", "0"]])
def test_sample_refuses(train, call, capsys, arguments):
    run = train("run", "--max_iters=1")
    with pytest.raises(SystemExit) as stop:
        call(sample, run, *arguments)
    assert stop.value.code == 2 and "must be" in capsys.readouterr().err
