"""Requests, results and tables that the commands on finished runs share."""

import json
import sys

import pytest

from scripts import attention_maps, downstream, eval_length, needle, passkey
from scripts.common.runs import Results

REQUESTS = [
    eval_length.LossRequest(rope="none", lengths=(16, 32), per_position=True),
    eval_length.LossRequest(rope="yarn", rope_factor=2.5, tokens=64, data_dir="here"),
    attention_maps.MapsRequest(rope="none", rope_theta=500000.0, layer=0, text="A text.", tokens=0),
    passkey.PasskeyRequest(rope="none", lengths=(300,), trials=100, seed=1337, device="cpu"),
    needle.NeedleRequest(
        rope="none", samples=3, score_length=200, score_trials=2, seed=1, checkpoint="best"
    ),
    downstream.TaskRequest(rope="none", tasks=("a", "b"), limit=5, dtype="bfloat16"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request.script)
def test_the_command_line_of_a_request_is_parsed_into_it(request_, monkeypatch, tmp_path):
    """As scripts.reproduce relies on it, which looks for the measurement by the same request."""
    module, parsed = sys.modules[type(request_).__module__], []
    parse = type(request_).parse

    def stop(arguments):
        parsed.append(parse(arguments))
        raise SystemExit

    monkeypatch.setattr(type(request_), "parse", stop)
    monkeypatch.setattr(sys, "argv", [module.__name__, *request_.arguments(), str(tmp_path)])
    with pytest.raises(SystemExit):
        module.main()
    assert parsed == [request_]
    assert request_.file(tmp_path).name == f"{module.__name__.removeprefix('scripts.')}.json"


def test_results_of_others_stay(tmp_path):
    path = tmp_path / "results.json"
    first, second = (Results(path, {"variant": name, "step": 7}) for name in ("a", "b"))
    first.add("one", {"value": 1})
    second.add("one", {"value": 2})
    first.add("two", {"value": 3})
    saved = json.loads(path.read_text())
    assert [one["variant"] for one in saved] == ["a", "b"] and saved[0]["environment"]["torch"]
    assert saved[0]["parts"] == {"one": {"value": 1}, "two": {"value": 3}}
    assert Results(path, {"variant": "a", "step": 7}).values == saved[0]
    assert Results(path, {"variant": "a", "step": 8}).values == {}
    second.save(picture="b.png")
    first.discard("picture")
    kept = json.loads(path.read_text())
    assert kept == [saved[0], {k: v for k, v in kept[1].items() if k != "picture"}]


def test_results_of_another_process_are_kept(tmp_path):
    mine, theirs = (Results(tmp_path / "results.json", {"step": 7}) for _ in range(2))
    mine.add("one", {"value": 1})
    theirs.add("two", {"value": 2})
    mine.add("three", {"value": 3})
    assert list(theirs.parts) == ["one", "two", "three"]
