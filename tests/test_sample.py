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


def test_a_sample_ends_before_its_end_of_text(trained, call, capsys, monkeypatch):
    def generate(model, idx, max_new_tokens, **options):
        end_of_text = idx[:, :1]
        return torch.cat((idx, idx[:, 1:], end_of_text, idx[:, 1:]), dim=1)

    monkeypatch.setattr(sample, "generate", generate)
    call(sample, trained, "--prompt=abc")
    assert capsys.readouterr().out == "abcabc\n" + "-" * 80 + "\n"
