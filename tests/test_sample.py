"""Text from a trained model."""

from scripts import sample


def test_sample_prints_text_that_goes_on_from_the_prompt(trained, call, capsys, refused):
    arguments = ("--prompt", "abc", "--max_new_tokens", 40, "--num_samples", 2)
    printed = []
    for more in ((), (), ("--seed", 7)):
        call(sample, trained, *arguments, *more)
        printed.append(capsys.readouterr().out)
    assert printed[0].count("abc") >= 2 and printed[0].count("-" * 80) == 2
    assert printed[0] == printed[1] != printed[2]
    refused(call, sample, trained, "--max_new_tokens=0", says="must be")
