"""Reading the documents of parquet files, from any one on."""

import json

import pytest

from data.documents import Documents, parquet_files

pytestmark = pytest.mark.usefixtures("no_fsync")


@pytest.mark.parametrize("rows_at_once", [1, 3, 16, 64])
def test_documents_from_any_one_on(corpus, monkeypatch, rows_at_once):
    """From the state of each document, in a reader of its own; batches cross row groups."""
    monkeypatch.setattr("data.documents.ROWS_AT_ONCE", rows_at_once)
    documents, folder = corpus
    files = sorted(folder.iterdir())
    whole = list(parquet_files("x", files).read())
    assert [text for text, _ in whole] == documents
    done = [parquet_files("x", files).done(n, state) for n, (_, state) in enumerate(whole)]
    assert parquet_files("x", files).size == 14 and done[0] == 0
    assert done == sorted(done) and 14 - 64 // 7 - 1 <= done[-1] <= 13
    reader = parquet_files("x", files)
    for start in range(rows_at_once % 5, len(documents), 17):
        state = json.loads(json.dumps(whole[start][1]))
        rest = list(reader.read(start, state))
        assert [text for text, _ in rest] == documents[start:]


def test_going_on_reads_no_earlier_row_group(corpus, monkeypatch):
    from datasets.packaged_modules.parquet.parquet import Parquet

    documents, folder = corpus
    files = sorted(folder.iterdir())
    generate, read = Parquet._generate_tables, []

    def counted(self, files, row_groups_list):
        read.extend(row_groups_list)
        return generate(self, files, row_groups_list)

    monkeypatch.setattr(Parquet, "_generate_tables", counted)
    monkeypatch.setattr("data.documents.ROWS_AT_ONCE", 7)
    *_, (_, state) = parquet_files("x", files).read()
    assert len(read) == 14
    read.clear()
    rest = parquet_files("x", files).read(len(documents) - 1, state)
    assert [text for text, _ in rest] == documents[-1:]
    assert read == [(5,), (6,), (7,)]  # of the second file; the last batch has rows of all three


def test_a_state_of_other_units_is_not_trusted(corpus):
    """Row groups in one way of reading, files in the other: what is passed over is counted."""
    documents, folder = corpus
    files = [str(file) for file in sorted(folder.iterdir())]
    by_file = Documents("x", "parquet", remote=True, data_files=files)
    by_group = parquet_files("x", files)
    assert (by_file.size, by_group.size) == (2, 14)
    for one, other in ((by_file, by_group), (by_group, by_file)):
        (_, state) = list(one.read())[80]
        assert [text for text, _ in other.read(80, state)] == documents[80:]
        assert [text for text, _ in one.read(80, state)] == documents[80:]
