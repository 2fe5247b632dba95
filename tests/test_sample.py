"""Text from a trained model."""

import pytest
import torch

from generation import generate
from layers.build import build_model
from scripts import export_hf, passkey, sample
from scripts.common.runs import load_run
from tests.helpers import saved_run, small_config


def test_sample_prints_text_that_goes_on_from_the_prompt(trained, call, capsys, refused):
    def printed(*more):
        call(sample, trained, "--prompt=abc", "--max_new_tokens=40", "--num_samples=2", *more)
        return capsys.readouterr().out

    text = printed()
    assert text.count("abc") >= 2
    assert text.count("-" * 80) == 2
    assert printed() == text
    assert printed("--seed=7") != text
    assert printed("--top_k=1", "--temperature=5") == printed("--temperature=0")
    says = "--max_new_tokens = 0 must be at least 1"
    refused(call, sample, trained, "--max_new_tokens=0", says=says)
    refused(
        call, sample, trained, "--temperature=inf", says="must be a number between -2**63 and 2**63"
    )
    refused(call, sample, trained, "--tokens=9", says="--tokens=9; did you mean max_new_tokens? ")


def test_a_missing_run_is_refused_before_the_first_is_loaded(
    trained, call, refused, monkeypatch, tmp_path, capsys
):
    picture = tmp_path / "curves.png"
    picture.touch()
    call(sample, picture, trained, "--max_new_tokens=3", "--num_samples=1")  # as of out/*
    assert capsys.readouterr().out
    monkeypatch.setattr(sample, "load_run", pytest.fail)
    refused(call, sample, trained, tmp_path / "missing", says="missing")


def test_several_prompts_are_continued_as_each_alone(trained, call, capsys):
    def texts(*prompts, samples=1):
        arguments = [f"--prompt={prompt}" for prompt in prompts]
        arguments += ["--max_new_tokens=20", "--temperature=0", f"--num_samples={samples}"]
        call(sample, trained, *arguments)
        return capsys.readouterr().out.split("\n" + "-" * 80 + "\n")[:-1]

    prompts = ("abc", "the longest of them", "xy")
    alone = [texts(prompt)[0] for prompt in prompts]
    assert texts(*prompts) == alone
    assert texts("abc", "xy", samples=2) == [alone[0], alone[0], alone[2], alone[2]]


def test_a_model_without_end_of_text_begins_with_the_prompt(call, capsys, refused, tmp_path):
    """As of characters of nanoGPT: vocab_size leaves the id out."""
    torch.manual_seed(0)
    config = small_config("softmax.py", "--vocab_size=256")
    run = saved_run(tmp_path / "run", build_model(config))
    call(sample, run, "--prompt=abc", "--max_new_tokens=5", "--temperature=0")
    printed = capsys.readouterr().out
    ids = torch.tensor([list(b"abc")])
    model = load_run(run).model
    expected = bytes(generate(model, ids, 5, temperature=0)[0].tolist())
    assert printed.startswith(expected.decode(errors="replace"))
    refused(call, sample, run, says="has no end-of-text token to begin with: give --prompt")
    refused(call, export_hf, run, tmp_path / "export", says="leaves it out")
    refused(call, passkey, run, says="has no end-of-text, with which every prompt begins")


def test_kernels_that_attend_to_padding_are_replaced(
    trained, call, capsys, automatic, joining_kernels
):
    def printed(*prompts):
        call(sample, trained, *prompts, "--max_new_tokens=20", "--temperature=0")
        return capsys.readouterr()

    alone = printed("--prompt=abc")
    assert alone.err == ""
    both = printed("--prompt=abc", "--prompt=the longest of them")
    assert "the kernels fail" in both.err
    assert both.out.startswith(alone.out)


def test_a_prompt_may_be_a_file(trained, call, capsys, refused, tmp_path):
    path = tmp_path / "prompt.txt"
    # a byte-order mark is dropped and line breaks are kept, as in training data
    path.write_bytes("\ufeffnaïve prompt\r\n".encode())

    def printed(prompt):
        call(sample, trained, f"--prompt={prompt}", "--max_new_tokens=3")
        return capsys.readouterr().out

    assert printed(f"FILE:{path}") == printed("naïve prompt\r\n")
    assert printed(f"FILE:{path}").startswith("naïve prompt\r\n")
    path.write_bytes(b"\xff")
    refused(call, sample, trained, f"--prompt=FILE:{path}", says=("prompt.txt", "cannot be read"))
    refused(call, sample, trained, "--prompt=FILE:none", says="FILE:none: the file cannot be read")


def test_a_sample_ends_before_its_end_of_text(trained, call, capsys, monkeypatch):
    def generate(model, prompts, max_new_tokens, **options):
        (prompt,) = prompts
        end_of_text = prompt[:1]
        return [torch.cat((prompt, prompt[1:], end_of_text, prompt[1:]))]

    monkeypatch.setattr(sample, "generate", generate)
    call(sample, trained, "--prompt=abc")
    assert capsys.readouterr().out == "abcabc\n" + "-" * 80 + "\n"
