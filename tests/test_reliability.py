"""No run is ever lost: kills within and beside a write, and full disks; all of them real."""

import random
import signal
import time

from runtime import checkpoint
from tests.faults import arguments, finish, run_command, start
from tests.runs import assert_same_run, checkpoint_bytes, go_on


def test_killed_and_resumed(shards, tmp_path):
    """Killed at file operations (int) and after seconds (float), and resumed after each."""
    folder = tmp_path / "killed"
    killed = 0
    command = arguments(shards, folder, "--checkpoint_interval=2", "--max_iters=8")
    # in a first start 21 is the rename of the first checkpoint, 24 the sync of the second
    for point in (21, 24, 18, 22, 0.6):
        if isinstance(point, int):
            code = run_command([*command, *go_on(folder)], kill_at=point)
            assert code in (0, -signal.SIGKILL)
            killed += code != 0
        else:
            process = start([*command, *go_on(folder)], slow=0.02)
            time.sleep(point)
            process.kill()
            killed += finish(process) != 0
    assert killed >= 4
    assert run_command([*command, *go_on(folder)]) == 0
    whole = tmp_path / "whole"
    assert run_command(arguments(shards, whole, "--checkpoint_interval=2", "--max_iters=8")) == 0
    assert_same_run(folder, whole)
    assert not list(folder.glob(".*.tmp"))
    assert len(list(folder.glob("*.pt"))) == 3  # the last two, and the best


def test_killed_inside_a_shard_write(tmp_path):
    """And on either side of its rename, and of the rename of meta.json."""
    source = tmp_path / "source"
    source.mkdir()
    rng = random.Random(2)
    for number in range(8):
        words = [str(rng.randrange(10**6)) for _ in range(300)]
        (source / f"{number}.txt").write_text(" ".join(words))
    command = [source, "--shard_size=2000", "--workers=1", "--out_dir"]
    killed = tmp_path / "killed"
    for point in (2, 9, 10, 11, 12):
        code = run_command([*command, killed], module="data.text", kill_at=point)
        assert code == -signal.SIGKILL
    assert run_command([*command, killed], module="data.text") == 0
    whole = tmp_path / "whole"
    assert run_command([*command, whole], module="data.text") == 0
    names = {file.name for file in whole.iterdir()}
    assert names == {file.name for file in killed.iterdir()}
    assert len(names) > 6
    for name in names:
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_a_full_disk_keeps_the_checkpoint_before(shards, tmp_path):
    folder = tmp_path / "run"
    output = tmp_path / "output"
    assert run_command(arguments(shards, folder, "--max_iters=3")) == 0
    before = checkpoint_bytes(folder)
    size = max(map(len, before.values()))
    command = arguments(shards, folder, "--resume")
    # best.pt still fits, the checkpoint does not
    assert run_command(command, output=output, file_limit=size - 1000) == 2
    message = output.read_text().splitlines()[-1]
    assert "step_000006.pt: cannot be written: File too large" in message
    assert "Traceback" not in output.read_text()
    for name in ("step_000000.pt", "step_000003.pt"):
        assert (folder / name).read_bytes() == before[name]
    assert checkpoint.find(folder).path.name == "step_000003.pt"
    assert run_command(command) == 0
    assert run_command(arguments(shards, tmp_path / "whole")) == 0
    assert_same_run(folder, tmp_path / "whole")
