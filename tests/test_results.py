"""Results files: measurements that several commands and processes share."""

import json
import multiprocessing

from scripts.common.results import Results


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
    first.save(picture="a.png")
    first.discard("picture")
    assert first.values["picture"] == "a.png"


def test_results_of_another_process_are_kept(tmp_path):
    mine, theirs = (Results(tmp_path / "results.json", {"step": 7}) for _ in range(2))
    mine.add("one", {"value": 1})
    theirs.add("two", {"value": 2})
    mine.add("three", {"value": 3})
    assert list(theirs.parts) == ["one", "two", "three"]


def add_many(path, name):
    for i in range(40):
        Results(path, {"step": 7}).add(f"{name} {i}", {"value": i})


def test_processes_that_add_at_the_same_time_lose_nothing(tmp_path):
    path, context = tmp_path / "results.json", multiprocessing.get_context("forkserver")
    others = [context.Process(target=add_many, args=(path, name)) for name in "ab"]
    for other in others:
        other.start()
    for other in others:
        other.join(60)
    assert len(Results(path, {"step": 7}).parts) == 80
