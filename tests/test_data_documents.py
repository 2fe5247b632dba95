"""Which rows become documents."""

from data.documents import Rules


def documents_of(rules, *rows):
    return list(rules.documents("a file, row", enumerate(rows)))


def test_rows_without_text_are_left_out_and_counted(capsys):
    rules = Rules("text")
    assert documents_of(rules, "a", "", None, "", " ") == ["a", " "]
    rules.report()
    assert capsys.readouterr().out == "empty documents left out: 3\n"


def test_documents_end_at_marks():
    text = "==one\nline\n==\n two == ==\n\nthree = 3\n==\n"
    rules = Rules("text", split_at="==")
    assert documents_of(rules, text) == ["one\nline", "two", "three = 3"]
    assert documents_of(rules, "a==b", "==") == ["a", "b"]
    assert rules.empty == 1
    assert documents_of(Rules("text"), text) == [text]


def test_marks_that_stay_text_are_counted(capsys):
    text = "one<|endoftext|>two<|endoftext|>"
    rules = Rules("text")
    assert documents_of(rules, text, "three") == [text, "three"]
    rules.report()
    says = "the text has <|endoftext|> 2 times; with --split_at"
    assert says in capsys.readouterr().out
    rules = Rules("text", split_at="<|endoftext|>")
    assert documents_of(rules, text) == ["one", "two"]
    rules.report()
    assert "warning" not in capsys.readouterr().out
    rules = Rules("text", eot_text="</s>")  # of another tokenizer
    assert documents_of(rules, text + "</s>") == [text + "</s>"]
    rules.report()
    assert "the text has </s> 1 times" in capsys.readouterr().out
