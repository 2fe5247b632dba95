"""The quickstart itself."""

import math
import shutil
import subprocess
import sys

import pytest

from tests.helpers import measured_losses
from tests.runs import ROOT, copy_of_repository


@pytest.mark.long
def test_an_interrupted_venv_is_completed(tmp_path):
    """As Ctrl-C leaves it before Python has installed pip into it."""
    (tmp_path / "scripts/common").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/common/setup.sh", tmp_path / "scripts/common")
    (tmp_path / "requirements.txt").write_text("pip\n")  # which is there by then
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    commands = "source scripts/common/setup.sh && setup requirements.txt"
    subprocess.run(["bash", "-c", commands], cwd=tmp_path, check=True)
    assert (tmp_path / ".venv/.installed-requirements.txt").exists()


def test_quickstart(tmp_path):
    """The script itself in a copy of the repository, with less training."""
    if not (ROOT / ".venv").exists():
        pytest.skip("scripts/test.sh makes the .venv that the quickstart uses")
    copy = copy_of_repository(tmp_path / "repository")
    (copy / ".venv").symlink_to(ROOT / ".venv")
    script = copy / "scripts/quickstart.sh"
    script.write_text(script.read_text().replace("--tokens 65536", "--tokens 4096"))
    done = subprocess.run(
        ["bash", "scripts/quickstart.sh", "--max_iters=4", "--n_layer=1", "--val_tokens=4096"],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    out = copy / "out/quickstart"
    picture = out / "loss_by_length_softmax_lssar_p15.png"
    assert picture.exists()
    assert f"picture: {picture.relative_to(copy)}\n" in printed
    for name in ("softmax", "lssar_p15"):
        result, control = measured_losses(out / name)
        assert result["variant"] == name
        assert control["window"] == 128
        assert result["lengths"] == [128, 256, 512, 1024, 2048, 4096]
        assert all(3 < loss < 1.1 * math.log(257) for loss in result["loss"])
        assert f"{result['loss'][-1]:.4f}" in printed
