import functools
import gc
import math
import os
import runpy
import shutil
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

# Without a GPU the kernels run in Triton's interpreter, which Triton looks up when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from data.shards import read_shard, write_meta, write_shard
from data.tokenizer import get_tokenizer
from tests.corpora import make_documents, write_parquet
from tests.helpers import SMALL, set_meta, write_scale
from tests.runs import run_train


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep what the imports made out of later garbage collections, a tenth of the tests' time."""
    gc.disable()
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """A folder of byte shards with something to learn: words of a small vocabulary."""
    folder = tmp_path_factory.mktemp("shards")
    rng = np.random.default_rng(0)
    words = []
    for length in rng.integers(2, 7, size=50):
        letters = rng.integers(97, 123, length, np.uint8)
        words.append(letters.tobytes() + b" ")
    for name, n in {"val_000000": 600, "train_000001": 3000, "train_000002": 999}.items():
        text = b"".join(words[i] for i in rng.integers(0, 50, size=n))
        tokens = np.frombuffer(text[:n], np.uint8).astype(np.uint16)
        tokens[0] = 256
        write_shard(folder / f"text_{name}.bin", tokens)
    write_meta(folder, set_meta("bytes"))
    return folder


@pytest.fixture(scope="session")
def documents(shards, tmp_path_factory):
    """A copy of the shards in which end-of-text begins many documents."""
    folder = shutil.copytree(shards, tmp_path_factory.mktemp("documents") / "data")
    generator = np.random.default_rng(0)
    for path in folder.glob("*.bin"):
        tokens = read_shard(path)
        tokens[generator.random(len(tokens)) < 0.15] = 256
        write_shard(path, tokens)
    return folder


def train_small(out, shards, *arguments):
    """Run train.py's main in this process; returns the run's folder."""
    run_train(*SMALL, f"--data_dir={shards}", f"--out_dir={out}", *arguments)
    return out


@pytest.fixture
def train(shards, tmp_path):
    return lambda name, *arguments: train_small(tmp_path / name, shards, *arguments)


@pytest.fixture
def poisoned_buffers(monkeypatch):
    """Fills the kernels' output buffers with NaN, so that a test sees what is left unwritten."""
    empty = torch.Tensor.new_empty

    def poisoned(self, *args, **kwargs):
        x = empty(self, *args, **kwargs)
        return x.fill_(math.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.fixture
def automatic(monkeypatch):
    """Makes 'auto' take the kernels, as on a GPU."""
    from attention_paths.module import Attention

    path = Attention.path
    monkeypatch.setattr(Attention, "path", lambda *a: "triton" if a[0].impl == "auto" else path(*a))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 4 queries of one sequence."""
    from attention_paths import blocked, sdpa

    monkeypatch.setattr(blocked, "BLOCK_QUERIES", 4)
    monkeypatch.setattr(sdpa, "BLOCK_QUERIES", 4)
    monkeypatch.setattr(blocked, "BLOCK_SCORES_CPU", 1)


@pytest.fixture
def joining_kernels(monkeypatch):
    """Kernels that attend across documents, and to padding."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from attention_paths import module
    from attention_paths.reference import ReferenceAttention

    def joining(layer, q, k, v, context):
        return ReferenceAttention.forward(layer, q, k, v, replace(context, document_positions=None))

    monkeypatch.setattr(module, "fused", joining)


@pytest.fixture(autouse=True, scope="session")
def better_interpreter():
    """Correct Triton's interpreter, and speed it up.

    It multiplies bfloat16 numbers as integers, and truncates float32 to bfloat16. It is slow where
    a kernel reduces by a function, which it calls in Python for each element, where a kernel calls
    a function, for which it patches the whole language again, and where integers are added or
    multiplied: it looks for overflow, but says so only in debug mode, which it does not have.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
        from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle
    except ImportError:
        yield
        return
    cast = InterpreterBuilder.cast_impl
    dot = InterpreterBuilder.create_dot
    patch_language = interpreter._patch_lang
    unchecked = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)

    def rounding_cast(self, x, dtype):
        if x.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, x, dtype)
        exact = torch.from_numpy(np.ascontiguousarray(x.data))
        rounded = exact.bfloat16().view(torch.uint16)
        return TensorHandle(rounded.numpy(), tl.bfloat16)

    def float32_dot(self, a, b, *more):
        if a.dtype.scalar == tl.bfloat16:
            a = cast(self, a, tl.float32)
            b = cast(self, b, tl.float32)
        return dot(self, a, b, *more)

    def by_columns(self, arguments):
        (x,) = arguments
        columns = [
            self.to_tensor(column, x.dtype) for column in np.moveaxis(x.handle.data, self.axis, 0)
        ]
        return [functools.reduce(self.combine_fn.fn, columns)]

    patched = set()

    def patch_once(function):
        if tl.core.is_builtin(tl.load):  # the last kernel has ended and restored the language
            patched.clear()
        if function.__module__ in patched:
            return interpreter._LangPatchScope()
        patched.add(function.__module__)
        return patch_language(function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)
        patch.setattr(InterpreterBuilder, "create_dot", float32_dot)
        patch.setattr(ReduceOps, "generic_reduce", by_columns)
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter.interpreter_builder, "options", unchecked)
        yield


@pytest.fixture
def call(monkeypatch):
    """Run a script's main in this process with these arguments."""

    def run(module, *arguments):
        argv = [module.__name__, *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", argv)
        module.main()

    return run


@pytest.fixture(scope="session")
def trained(shards, tmp_path_factory):
    """A run of a second whose training length is enough for a short question.

    Tests that write into it take a copy, the fixture `run`.
    """
    longer = ["--block_size=128", "--total_batch_size=1024", "--attention=lssar", "--p=3"]
    return train_small(tmp_path_factory.mktemp("runs") / "run", shards, *longer)


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def pictures(monkeypatch):
    """The paths of the pictures that a command would write; drawing one takes a second."""
    from scripts.common import runner

    paths = []
    monkeypatch.setattr(runner, "save_picture", lambda figure, path: paths.append(path))
    return paths


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Shards of 20,000 validation tokens of each tokenizer, with ends of text between."""
    folders = {}
    for name in ("bytes", "gpt2"):
        tokenizer = get_tokenizer(name)
        document = [tokenizer.eot, *tokenizer.encode("Such is life. ")]
        tokens = np.array(document * 9000, dtype=np.uint16)
        folders[name] = tmp_path_factory.mktemp(name)
        write_shard(folders[name] / "text_val_000000.bin", tokens[:20000])
    return folders


@pytest.fixture(scope="session")
def gpt2_file(tmp_path_factory):
    """GPT-2's vocabulary as a tokenizer.json."""
    from scripts.export_hf import byte_level_bpe

    path = tmp_path_factory.mktemp("gpt2_file") / "tokenizer.json"
    byte_level_bpe("gpt2").save(str(path))
    return path


@pytest.fixture(scope="session")
def words_file(tmp_path_factory):
    """A tokenizer.json of six words, which cuts texts and adds an end to each, and a gap in ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {"?": 0, "the": 1, "cat": 2, "sat": 3, "on": 4}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<s>", "</s>"])
    words.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 6)])
    words.enable_truncation(5)
    path = tmp_path_factory.mktemp("words_file") / "words.json"
    words.save(str(path))
    return path


@pytest.fixture(autouse=True, scope="session")
def no_fsync():
    """Skip syncs in this process: there are thousands of small files, and no test cuts the power.

    Child processes, such as the runs of tests.faults that are killed at a sync, do sync.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.files.os.fsync", lambda descriptor: None)
        yield


@pytest.fixture
def refused(capsys):
    """Make a call that must exit with code 2 and a sentence that has these words, or all of them
    if `says` is a tuple."""

    def run(function, *arguments, says):
        with pytest.raises(SystemExit) as stop:
            function(*arguments)
        message = capsys.readouterr().err
        assert stop.value.code == 2
        assert message.splitlines()[-1].startswith("error: ")
        for words in [says] if isinstance(says, str) else says:
            assert words in message, message

    return run


@pytest.fixture
def corpus(tmp_path):
    """Documents, and the folder of two parquet files that holds them."""
    documents = make_documents(60) + ["", "x"] + make_documents(30, seed=1)
    folder = tmp_path / "parquet"
    folder.mkdir()
    write_parquet(folder / "000_00000.parquet", documents[:40])
    write_parquet(folder / "001_00000.parquet", documents[40:])
    return documents, folder


@pytest.fixture(autouse=True, scope="session")
def usual_signals():
    """Handle signals that are ignored under nohup or in a shell's background, also in children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def full_precision():
    """A command on a GPU chooses TF32 for its whole process."""
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """One thread: sums have the same order at any load, and tests leave the other cores alone."""
    torch.set_num_threads(1)


@pytest.fixture
def scale(tmp_path):
    """A scale file with the settings of SMALL."""
    return write_scale(tmp_path / "small.py", *SMALL)


@pytest.fixture
def commands(monkeypatch):
    """The training commands of scripts.reproduce and compare, run in this process; a list."""
    from scripts.reproduce import cost, planned

    monkeypatch.setattr(cost, "MEASURED_SECONDS", 0.1)
    done = []

    def call(command):
        done.append(command)
        monkeypatch.setattr(sys, "argv", command[1:])
        try:
            runpy.run_path(command[1], run_name="__main__")
        except SystemExit as stop:
            return stop.code or 0
        return 0

    monkeypatch.setattr(planned, "call", call)
    return done


@pytest.fixture
def reproduced(call, commands, scale, shards, tmp_path):
    """`python -m scripts.reproduce NAME ...` at that scale; returns the table's folder."""
    from scripts.reproduce import __main__ as reproduce

    def run(name, *arguments):
        common = [
            "--wandb_mode=disabled",
            f"--data_dir={shards}",
            f"--out={tmp_path / 'out'}",
            f"--scale={scale}",
            f"--results={tmp_path / 'results'}",
        ]
        call(reproduce, name, *common, *arguments)
        return tmp_path / "results/small" / name

    return run
