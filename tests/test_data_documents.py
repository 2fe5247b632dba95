"""Which rows become documents."""

import pytest

from data.documents import Rules


def texts_of(documents):
    return ["".join(document) for document in documents]


def chunks_of(text, size):
    return [text[start : start + size] for start in range(0, len(text), size)]


def test_rows_without_text_are_left_out_and_counted(capsys):
    rows = [("row 0", "a"), ("row 1", ""), ("row 2", None), ("row 3", ""), ("row 4", " ")]
    rules = Rules("text")
    assert texts_of(rules.documents(rows)) == ["a", " "]
    rules.report()
    assert capsys.readouterr().out == "empty documents left out: 3\n"
    assert texts_of(rules.cut(iter([]))) == []  # an empty file


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_documents_end_at_marks_wherever_chunks_do(size, capsys):
    text = "==one\nline\n==\n two == ==\n\nthree = 3\n==\n"
    rules = Rules("text", split_at="==")
    assert texts_of(rules.cut(chunks_of(text, size))) == ["one\nline", "two", "three = 3"]
    rules.report()
    assert capsys.readouterr().out == "documents end at '==': 5 times\n"
    Rules("text", split_at="==").report()  # has read nothing, as where the shards are complete
    assert capsys.readouterr().out == ""
    assert texts_of(rules.documents([("row 0", "a==b"), ("row 1", "==")])) == ["a", "b"]
    assert rules.counts["empty"] == 1
    mistyped = Rules("text", split_at="=-=")
    assert texts_of(mistyped.cut(chunks_of(text, size))) == [text.strip()]
    mistyped.report()
    assert capsys.readouterr().out == "documents end at '=-=': 0 times\n"
    assert texts_of(Rules("text").cut(chunks_of(text, size))) == [text]


def test_marks_that_stay_text_are_counted(capsys):
    text = "one<|endoftext|>two<|endoftext|>"
    rules = Rules("text")
    assert texts_of(rules.documents([("row 0", text), ("row 1", "three")])) == [text, "three"]
    rules.report()
    says = "the text has <|endoftext|> 2 times; with --split_at"
    assert says in capsys.readouterr().out
    rules = Rules("text", split_at="<|endoftext|>")
    assert texts_of(rules.cut([text])) == ["one", "two"]
    rules.report()
    assert "warning" not in capsys.readouterr().out
    rules = Rules("text", eot_text="</s>")  # of another tokenizer
    assert texts_of(rules.cut([text + "</s>"])) == [text + "</s>"]
    rules.report()
    assert "the text has </s> 1 times" in capsys.readouterr().out
