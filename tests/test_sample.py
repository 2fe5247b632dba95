"""Text from a trained model."""

import torch

from scripts import sample


def test_sample_prints_text_that_goes_on_from_the_prompt(trained, call, capsys, refused):
    def printed(*more):
        call(sample, trained, "--prompt=abc", "--max_new_tokens=40", "--num_samples=2", *more)
        return capsys.readouterr().out

    text = printed()
    assert text.count("abc") >= 2
    assert text.count("-" * 80) == 2
    assert printed() == text
    assert printed("--seed=7") != text
    refused(call, sample, trained, "--max_new_tokens=0", says="must be")
    refused(call, sample, trained, "--temperature=inf", says="must be a finite number")
    refused(call, sample, trained, "--tokens=9", says="--tokens=9; did you mean max_new_tokens? ")


def test_a_prompt_may_be_a_file(trained, call, capsys, refused, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("naïve prompt\n", encoding="utf-8")

    def printed(prompt):
        call(sample, trained, f"--prompt={prompt}", "--max_new_tokens=3")
        return capsys.readouterr().out

    assert printed(f"FILE:{path}") == printed("naïve prompt\n")
    assert printed(f"FILE:{path}").startswith("naïve prompt\n")
    path.write_bytes(b"\xff")
    refused(call, sample, trained, f"--prompt=FILE:{path}", says=("prompt.txt", "cannot be read"))
    refused(call, sample, trained, "--prompt=FILE:none", says="FILE:none: the file cannot be read")


def test_a_sample_ends_before_its_end_of_text(trained, call, capsys, monkeypatch):
    def generate(model, idx, max_new_tokens, **options):
        end_of_text = idx[:, :1]
        return torch.cat((idx, idx[:, 1:], end_of_text, idx[:, 1:]), dim=1)

    monkeypatch.setattr(sample, "generate", generate)
    call(sample, trained, "--prompt=abc")
    assert capsys.readouterr().out == "abcabc\n" + "-" * 80 + "\n"
