"""Tables of aligned columns."""

from collections.abc import Sequence


def print_table(
    rows: Sequence[Sequence[str]], left: int = 1, width: int = 0, remarks: Sequence[str] = ()
) -> None:
    """Print aligned columns.

    The first `left` are flush left, the rest flush right and at least `width` wide. `remarks` are
    printed after the first rows.
    """
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    for i, row in enumerate(rows):
        cells = [cell.ljust(w) for cell, w in zip(row[:left], widths[:left], strict=True)]
        cells += [
            cell.rjust(max(w, width)) for cell, w in zip(row[left:], widths[left:], strict=True)
        ]
        print("".join(cells) + (f"   {remarks[i]}" if i < len(remarks) else ""))
