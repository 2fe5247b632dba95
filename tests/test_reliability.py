"""No run is ever lost: kills at every point of a write, and full disks; all of them real."""

import os
import random
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime import checkpoint
from tests.faults import arguments, finish, run, start
from tests.runs import assert_same_run, go_on


def kills(shards, tmp_path, when, steps):
    """A run killed at each of these file operations (int), or after these seconds (float).

    It is resumed after each. Returns the number of kills; the run is finished in the end.
    """
    folder, count = tmp_path / "killed", 0
    command = arguments(shards, folder, "--checkpoint_interval=2", f"--max_iters={steps}")
    for point in when:
        if isinstance(point, int):
            code = run([*command, *go_on(folder)], kill_at=(point, tmp_path / "notes"))
            assert code in (0, -signal.SIGKILL)
            count += code != 0
        else:
            process = start([*command, *go_on(folder)], slow=0.02)
            time.sleep(point)
            process.kill()
            count += finish(process) != 0
    assert run([*command, *go_on(folder)]) == 0
    whole = tmp_path / "whole"
    assert run(arguments(shards, whole, "--checkpoint_interval=2", f"--max_iters={steps}")) == 0
    assert_same_run(folder, whole)
    assert not list(folder.glob(".*.tmp"))
    assert len(list(folder.glob("*.pt"))) == 3  # the last two, and the best
    return count


def test_killed_and_resumed(shards, tmp_path):
    # in a first start 18 is the rename of the first checkpoint, 21 the sync of the second
    assert kills(shards, tmp_path, [18, 21, 15, 19, 0.6], 8) >= 4


@pytest.mark.long
def test_killed_and_resumed_a_thousand_times(shards, tmp_path):
    def many(number):
        """32 kills of a run, which would end after about 40."""
        rng, folder = random.Random(number), tmp_path / str(number)
        folder.mkdir()
        when = [rng.randrange(1, 40) for _ in range(26)] + [rng.uniform(0, 0.7) for _ in range(6)]
        rng.shuffle(when)
        count = kills(shards, folder, when, 120)
        noted = Counter((folder / "notes").read_text().split())
        noted["at a random time"] = count - noted.total()
        return noted

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = sum(pool.map(many, range(32)), Counter())
    print(f"\nkills of a training run: {done.total()}: {dict(done)}")
    assert done.total() >= 1000


def shard_kills(tmp_path, points, shard_size=2000):
    source = tmp_path / "source"
    source.mkdir()
    rng = random.Random(2)
    for number in range(8):
        words = [str(rng.randrange(10**6)) for _ in range(300)]
        (source / f"{number}.txt").write_text(" ".join(words))
    more = [source, "--tokenizer", "bytes", "--shard_size", shard_size, "--workers", 1, "--out_dir"]
    count = 0
    for point in points:
        faults = {"kill_at": (point, tmp_path / "notes")}
        code = run([*more, tmp_path / "killed"], module="data.text", **faults)
        assert code in (0, -signal.SIGKILL)
        count += code != 0
    for name in ("killed", "whole"):
        assert run([*more, tmp_path / name], module="data.text") == 0
    contents = [
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir() if file.suffix}
        for name in ("killed", "whole")
    ]
    assert contents[0] == contents[1] and len(contents[0]) > 5
    return count


def test_killed_inside_a_shard_write(tmp_path):
    """And on either side of its rename, and of the rename of meta.json."""
    assert shard_kills(tmp_path, [2, 9, 10, 11, 12]) == 5


def test_a_full_disk_keeps_the_checkpoint_before(shards, tmp_path):
    folder, output = tmp_path / "run", tmp_path / "output"
    assert run(arguments(shards, folder, "--max_iters=3")) == 0
    before = {path.name: path.read_bytes() for path in folder.glob("*.pt")}
    size = max(map(len, before.values()))
    command = [*arguments(shards, folder), "--resume"]
    # best.pt still fits, the checkpoint does not
    assert run(command, output=output, file_limit=size - 1000) == 2
    message = output.read_text().splitlines()[-1]
    assert "step_000006.pt: cannot be written: File too large" in message
    assert "Traceback" not in output.read_text()
    for name in ("step_000000.pt", "step_000003.pt"):
        assert (folder / name).read_bytes() == before[name]
    assert checkpoint.find(folder).path.name == "step_000003.pt"
    assert run(command) == 0
    assert run(arguments(shards, tmp_path / "whole")) == 0
    assert_same_run(folder, tmp_path / "whole")
