"""What a run says before its first step, and that --dry_run writes nothing."""

from runtime.files import lock_folder


def test_a_dry_run_says_what_a_run_takes_and_writes_nothing(train, capsys):
    out = train("run", "--dry_run", "--max_iters=7", "--val_tokens=10000")
    printed = capsys.readouterr().out
    assert not out.exists()
    sentences = (
        f"softmax: 33,696 parameters on cpu in float32; run folder {out}",
        "3,999 tokens, 592 for validation",
        "896 tokens in steps of 128 (processes x micro-batches x batch_size x block_size = 1 x 1 x "
        "8 x 16), 1.8e+08 FLOP to do, step 0 of 7",
        "dry run: all checks passed; nothing was written",
    )
    for sentence in sentences:
        assert sentence in printed


def test_a_dry_run_warns_of_settings_that_a_user_may_not_mean(train, capsys):
    train("run", "--dry_run", "--max_iters=7000", "--tokenizer=bytes", "--window=16")
    printed = capsys.readouterr().out
    assert "them 225 times" in printed
    assert "warning: window = 16 hides nothing at block_size = 16" in printed
    assert printed.count("warning") == 1
    train("run", "--dry_run", "--max_iters=8", "--warmup_iters=9")
    words = "warning: warmup_iters = 9 of max_iters = 8 steps: the learning rate only rises"
    assert words in capsys.readouterr().out


def test_a_dry_run_lists_windows_that_differ_by_layer(train, capsys):
    sizes = ("--n_layer=5", "--window=4")
    train("run", "--dry_run", *sizes, "--window_pattern=SSL")
    # the third by the pattern, and the last
    assert "windows by layer: 4, 4, all, 4, all\n" in capsys.readouterr().out
    train("run", "--dry_run", *sizes)
    assert "windows by layer" not in capsys.readouterr().out
    train("run", "--dry_run", "--nope_every=2", "--nope_share=0.5", "--local_window=4")
    assert "windows by layer: 4, all and 4\n" in capsys.readouterr().out


def test_a_dry_run_before_the_data_are_made(train, capsys, tmp_path, refused):
    refused(train, "run", "--dry_run", f"--data_dir={tmp_path}", says="no *_train_*.bin")
    train("run", "--dry_run", f"--data_dir={tmp_path}/none", "--max_iters=9")
    printed = capsys.readouterr().out
    assert "none does not exist yet; create it with data.fineweb or data.text" in printed


def test_a_dry_run_beside_a_training(train, capsys):
    """It takes no lock: how long would the run take to another number of steps?"""
    folder = train("run", "--max_iters=2")
    with lock_folder(folder, "training this run"):
        train("run", "--dry_run", "--resume", "--max_iters=9")
    assert "step 2 of 9" in capsys.readouterr().out


def test_a_dry_run_of_a_folder_that_cannot_be_made(train, tmp_path, refused):
    (tmp_path / "file").touch()
    refused(train, "file/run", "--dry_run", says="no file can be written there")


def test_a_dry_run_of_a_run_that_would_be_resumed(train, capsys):
    run = train("run", "--max_iters=2")
    before = {path: path.read_bytes() for path in run.iterdir()}
    train("run", "--dry_run", "--resume", "--max_iters=4")
    assert "step 2 of 4" in capsys.readouterr().out
    after = {path: path.read_bytes() for path in run.iterdir()}
    assert after == before
