import pytest

# a failing assert in these modules shows its values, as in a test file
pytest.register_assert_rewrite(
    "tests.corpora", "tests.faults", "tests.fused", "tests.helpers", "tests.runs", "tests.textbook"
)
