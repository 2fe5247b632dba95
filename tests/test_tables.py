"""Tables of aligned columns."""

from scripts.common.tables import print_table


def test_columns_are_aligned(capsys):
    print_table([["", "1x"], ["", "128"], ["softmax", "1.5"]], width=9, remarks=["of all"])
    print_table([["task", "metric", "value"], ["a", "acc_norm", "50.00"]], left=2)
    assert capsys.readouterr().out.splitlines() == [
        "                1x   of all",
        "               128",
        "softmax        1.5",
        "task  metric      value",
        "a     acc_norm    50.00",
    ]
