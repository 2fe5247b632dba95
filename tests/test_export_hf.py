"""An exported run in transformers: in this process, and in one that lacks this repository."""

import ast
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from data.tokenizer import get_tokenizer
from errors import UserError
from generation import generate
from runtime import checkpoint
from scripts import export_hf
from scripts.common.options import Options
from scripts.common.runs import load_run
from tests.helpers import ROWS, saved_run, small_model
from tests.runs import ROOT, metrics
from tests.test_data_tokenizer import TEXTS, random_texts

transformers = pytest.importorskip("transformers", reason="pip install -r requirements-eval.txt")

GREEDY = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None}
# Exported by the command: all that layers share, or not, and a scaled RoPE.
CASES = {
    "t6_lssar_p15.py --head_size=6 --mlp_hidden=24": {},
    "softmax.py --tokenizer=gpt2 --vocab_size=50300": {
        "rope": "none",
        "log_base": 50.0,
    },
    "relu_wortsman.py --mlp=swiglu --norm=rmsnorm --bias=False": {
        "rope": "yarn",
        "rope_factor": 4.0,
    },
    "ablations/ssmax_probe.py --tie_embeddings=False": {"rope_theta": 5e5},
    "softmax.py --n_layer=3 --window=4 --window_pattern=SL": {
        "rope": "none",
        "window": 12,
    },
}
# What a user of an exported folder does; it knows nothing of this repository.
USER = """
import importlib, pathlib
from importlib.util import find_spec
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

assert not any(find_spec(name) for name in ("attention", "model", "config", "errors"))
torch.set_grad_enabled(False)
for folder, run in torch.load("runs.pt").items():
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    assert [tokenizer.encode(text) for text in run["texts"]] == run["ids"]
    assert [tokenizer.decode(ids) for ids in run["ids"]] == run["texts"]
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == run["eot"]
    assert sum(p.numel() for p in model.parameters()) == run["parameters"]
    for x, logits in run["logits"]:
        assert_close(model(x).logits, logits, rtol=0, atol=1e-6)
    assert torch.equal(model.generate(run["logits"][0][0], **run["greedy"]), run["text"])
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 16
card = pathlib.Path(folder, "README.md").read_text()
exec(card.split("```python\\n")[1].split("```")[0])  # what it says of loading
package = type(model).__module__.rpartition(".")[0]
for path in pathlib.Path(folder).glob("*.py"):
    importlib.import_module(f"{package}.{path.stem}")
"""


def open_run(folder, case, **options):
    """A small run of a config file."""
    path = saved_run(folder, small_model(case).float())
    return load_run(path, Options(device="cpu", **options))


def load_in_transformers(folder, case, **options):
    """A small run, and its model in transformers, saved and loaded."""
    run = open_run(folder / "run", case, **options)
    model = export_hf.transformers_model(run)
    model.save_pretrained(folder / "hf")
    return run, type(model).from_pretrained(folder / "hf")


def tokens(length):
    generator = torch.Generator().manual_seed(length)
    return torch.randint(257, (2, length), generator=generator)


def native_loss(run, x):
    """The loss of predicting each token of x [B, L] from those before it."""
    targets = x[:, 1:].contiguous()
    return run.model(x[:, :-1], targets)


def export(run, target, **options):
    arguments = [f"--{name}={value}" for name, value in options.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["export_hf", str(run), str(target), *arguments])
        export_hf.main()


@torch.no_grad()
def expectations(run):
    """What an exported run must compute."""
    tokenizer = get_tokenizer(run.config.tokenizer)
    texts = [text for text in TEXTS if text]
    logits = []
    for n in (5, 16, 40):  # the training length is 16
        x = tokens(n)
        logits.append((x, run.model(x)))
    return {
        "texts": texts,
        "ids": [tokenizer.encode(text) for text in texts],
        "eot": tokenizer.eot,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "logits": logits,
        "greedy": GREEDY,
        "text": generate(run.model, tokens(5), 20, temperature=0),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The user's folder, with all CASES exported and what they must compute, beside the runs."""
    folder = tmp_path_factory.mktemp("export")
    runs = {}
    for number, (case, options) in enumerate(CASES.items()):
        run = open_run(folder / f"run{number}", case, **options)
        export(run.path, folder / f"user/model{number}", **options)
        runs[f"model{number}"] = expectations(run)
    torch.save(runs, folder / "user/runs.pt")
    return folder


def test_an_export_is_the_run(folder):
    (folder / "user/user.py").write_text(USER)
    environment = os.environ | {
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, "user.py"],
        cwd=folder / "user",
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("case", [*ROWS, "t6.py", "hybrid.py --sink=learned"])
@torch.no_grad()
def test_every_config_is_loaded(case, tmp_path):
    """transformers builds the model on the meta device, then reads the weights."""
    run, model = load_in_transformers(tmp_path, case)
    x = tokens(16)
    assert_close(model(x).logits, run.model(x), rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_call_takes_what_transformers_models_take(tmp_path):
    run, model = load_in_transformers(tmp_path, "lssar_p15.py", rope="none")
    x = tokens(5)
    logits = run.model(x)
    loss = native_loss(run, x)
    assert_close(model(x, labels=x).loss, loss)
    assert_close(model(x, labels=x, return_dict=False), (loss, logits))
    labels = x.clone()
    labels[:, :3] = -100  # ignored
    expected = F.cross_entropy(logits[:, 2:-1].flatten(0, 1), x[:, 3:].flatten())
    assert_close(model(x, labels=labels).loss, expected)
    for last in (2, torch.tensor([3, 4])):
        assert_close(model(x, logits_to_keep=last).logits, logits[:, -2:])


@torch.no_grad()
def test_beams_and_the_cache_change_no_text(tmp_path):
    run, model = load_in_transformers(tmp_path, "lssar_p15.py", rope="dynamic_ntk")
    x = tokens(5)  # of 25 tokens in all, where the training length is 16
    expected = generate(run.model, x, 20, temperature=0)
    assert torch.equal(model.generate(x, use_cache=False, **GREEDY), expected)
    for beams in (1, 2):
        options = {"attention_mask": torch.ones_like(x), "num_beams": beams, **GREEDY}
        cached = model.generate(x, use_cache=True, **options)
        without_cache = model.generate(x, use_cache=False, **options)
        assert torch.equal(cached, without_cache)
    # a cache has room for one call alone, and its keys are turned for that call's length
    first = model.generate(x, return_dict_in_generate=True, **GREEDY)
    with pytest.raises(ValueError, match="generate takes no past_key_values"):
        model.generate(first.sequences, past_key_values=first.past_key_values, **GREEDY)


# ---- padding and packed documents ----

# Different mechanisms: scales of n, cosines, stage 2, windows, gates, slopes, factors, whole rows.
PADDED = {
    "softmax.py": {},
    "ssmax.py": {"rope": "yarn"},
    "lssa.py --window=5": {},
    "lssar_p15.py": {},
    "hybrid_ssmax.py --local_window=4": {"rope": "yarn"},
    "fox.py": {},
    "gated.py --qk_norm=True --sink=learned": {},
    "softmax_alibi.py": {},
    "stick_breaking.py": {},
    "asentmax.py": {},
    "t6_lssar_p15.py --head_size=6 --mlp_hidden=24": {},
    "softmax.py --positions=learned --block_size=40 --total_batch_size=40": {},
}
LENGTHS = (4, 11, 20, 6)  # the training length is 16
SHORT = GREEDY | {"max_new_tokens": 6}


@pytest.fixture(params=PADDED, scope="module")
def padded_case(request, tmp_path_factory):
    """A run's model and the same in transformers, in float64."""
    folder = tmp_path_factory.mktemp("padded")
    run, model = load_in_transformers(folder, request.param, **PADDED[request.param])
    return run.model.double(), model.double()


def pad(texts, side):
    """The ids of texts padded with any ids, and their attention mask."""
    longest = max(map(len, texts))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(257, (len(texts), longest), generator=generator)
    mask = torch.zeros_like(ids)
    for row, row_mask, text in zip(ids, mask, texts, strict=True):
        if side == "left":
            place = slice(longest - len(text), None)
        else:
            place = slice(len(text))
        row[place] = text
        row_mask[place] = 1
    return ids, mask


def prompts():
    return [tokens(length)[0] for length in LENGTHS]


@torch.no_grad()
def test_padding_changes_no_logits(padded_case):
    """On either side, also beyond the training length, where RoPE is scaled."""
    native, model = padded_case
    for side in ("left", "right"):
        ids, mask = pad(prompts(), side)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        for options in ({}, {"position_ids": positions}):
            logits = model(ids, attention_mask=mask, **options).logits
            for row, row_mask, text in zip(logits, mask.bool(), prompts(), strict=True):
                (alone,) = native(text[None])
                assert_close(row[row_mask], alone, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_batch_of_prompts_is_continued_as_each_alone(padded_case):
    native, model = padded_case
    ids, mask = pad(prompts(), "left")
    for use_cache in (True, False):
        texts = model.generate(ids, attention_mask=mask, use_cache=use_cache, **SHORT)
        for text, prompt in zip(texts, prompts(), strict=True):
            (alone,) = generate(native, prompt[None], 6, temperature=0)
            assert torch.equal(text[-len(alone) :], alone)


@torch.no_grad()
def test_beams_of_padded_prompts_are_those_of_each_alone(tmp_path):
    _, model = load_in_transformers(tmp_path, "ssmax.py --document_mask")
    model.double()
    ids, mask = pad(prompts(), "left")
    texts = model.generate(ids, attention_mask=mask, num_beams=3, **SHORT)
    for text, prompt in zip(texts, prompts(), strict=True):
        (alone,) = model.generate(prompt[None], num_beams=3, **SHORT)
        assert torch.equal(text[-len(alone) :], alone)


@torch.no_grad()
def test_a_pipeline_takes_a_batch(tmp_path):
    run, model = load_in_transformers(tmp_path, "lssar_p15.py")
    tokenizer = export_hf.transformers_tokenizer(run.config)
    pipeline = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["a", "a longer text than the others are", "one"]
    mask = torch.tensor(tokenizer(texts, padding=True)["attention_mask"])
    assert mask[:, 0].tolist() == [0, 1, 0]  # padded on the left
    assert mask[:, -1].all()
    batch = pipeline(texts, batch_size=2, **GREEDY)
    for text, (generated,) in zip(texts, batch, strict=True):
        ids = torch.tensor([tokenizer.encode(text)])
        (alone,) = generate(run.model, ids, 20, temperature=0)
        assert generated["generated_text"] == tokenizer.decode(alone)


@torch.no_grad()
def test_masks_that_are_no_padding_are_refused(tmp_path):
    run, model = load_in_transformers(tmp_path, "lssar_p15.py", rope="none")
    ids, mask = pad(prompts(), "left")
    expected = model(ids, attention_mask=mask).logits
    assert_close(model(ids, attention_mask=mask.bool()).logits, expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="takes padding on the left: tokenizer.padding_side"):
        model.generate(ids, attention_mask=mask.flip(1), **GREEDY)
    # a chunk may be padding alone
    text = model.generate(ids, attention_mask=mask, **GREEDY)
    chunked = model.generate(ids, attention_mask=mask, prefill_chunk_size=2, **GREEDY)
    assert torch.equal(chunked, text)
    # without a mask there is no padding, though prompts begin with the token of padding
    end_of_text = torch.full((1, 1), 256)
    prompt = torch.cat((end_of_text, tokens(4)[:1]), dim=1)
    text = model.generate(prompt, **GREEDY)
    assert torch.equal(text, generate(run.model, prompt, 20, temperature=0))
    hole = torch.ones_like(mask)
    hole[1, 5] = 0
    with pytest.raises(ValueError, match="has zeros between the tokens of a row"):
        model(ids, attention_mask=hole)
    numbered = torch.ones_like(mask)
    numbered[:, 7:] = 2
    with pytest.raises(ValueError, match="values other than 0 and 1: position_ids that restart"):
        model(ids, attention_mask=numbered)
    causal = torch.ones(4, 1, 20, 20).tril()
    with pytest.raises(ValueError, match=r"must be \[4, 20\], 1 for .* and is \[4, 1, 20, 20\]"):
        model(ids, attention_mask=causal)


@torch.no_grad()
def test_packed_documents_are_computed_as_each_alone(padded_case):
    """As transformers' collator packs them, after whose documents no other attends."""
    native, model = padded_case
    features = [{"input_ids": text.tolist()} for text in prompts()]
    batch = transformers.DataCollatorWithFlattening()(features)
    ids = batch["input_ids"]
    positions = batch["position_ids"]
    (packed,) = model(ids, position_ids=positions).logits
    for logits, text in zip(packed.split(LENGTHS), prompts(), strict=True):
        (alone,) = native(text[None])
        assert_close(logits, alone, rtol=1e-9, atol=1e-9)
    (text,) = model.generate(ids, position_ids=positions, **SHORT)
    last_prompt = prompts()[-1]
    (alone,) = generate(native, last_prompt[None], 6, temperature=0)
    assert torch.equal(text[-len(alone) :], alone)


@torch.no_grad()
def test_positions_count_the_tokens_of_a_document(tmp_path):
    run, model = load_in_transformers(tmp_path, "lssar_p15.py", rope="none")
    x = tokens(8)
    positions = torch.arange(8)[None]
    logits = run.model(x)
    for accepted in (positions, positions.expand(2, 8), positions[0]):
        assert_close(model(x, position_ids=accepted).logits, logits, rtol=0, atol=1e-6)
    for refused in (positions + 1, positions.flip(1), positions // 2):
        with pytest.raises(ValueError, match="position_ids must count from 0 .* in each document"):
            model(x, position_ids=refused)
    with pytest.raises(ValueError, match="output_attentions is not supported"):
        model(x, output_attentions=True)
    # boundaries of documents in the words of DataCollatorWithFlattening
    for name in ("cu_seq_lens_q", "seq_idx"):
        with pytest.raises(ValueError, match=f"{name} .* by position_ids that restart from 0"):
            model(x, **{name: torch.tensor([0, 5, 8])})


@torch.no_grad()
def test_a_model_with_document_mask_reads_documents_from_its_ids(words_file, tmp_path):
    """And from its positions; the tokenizer's file is not needed."""
    from tokenizers import Tokenizer

    copied = shutil.copy(words_file, tmp_path / "words.json")
    case = f"ssmax.py --document_mask --align_documents --tokenizer={copied}"
    run = open_run(tmp_path / "run", case)
    target = tmp_path / "hf"
    export(run.path, target)
    card = (target / "README.md").read_text()
    assert "| document_mask | True |" in card
    # as in training, without the end-of-text that this file puts behind a text
    text = "the cat sat"
    exported = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert exported.encode(text).ids == get_tokenizer(str(copied)).encode(text)
    copied.unlink()
    model = type(export_hf.transformers_model(run)).from_pretrained(target)
    end_of_text = 6
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(end_of_text, (2, 24), generator=generator)
    x[0, [7, 15]] = end_of_text
    x[1, 3] = end_of_text
    assert_close(model(x).logits, run.model(x), rtol=0, atol=1e-5)
    # end-of-text at the end of a row may be padding: lm-eval pads with id 0, without a mask
    padded = torch.tensor([[6, 1, 2, 6, 6, 6], [1, 6, 6, 1, 2, 3]])
    starts = model.document_starts(padded, None, None, None)
    assert starts.int().tolist() == [[1, 0, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0]]
    generated = model.generate(x, **GREEDY)
    for use_cache in (True, False):
        text = model.generate(x[:1, 15:], use_cache=use_cache, **GREEDY)
        assert torch.equal(text, generated[:1, 15:])
    positions = torch.cat((torch.arange(11), torch.arange(13)))[None]
    packed = model(x, position_ids=positions).logits
    assert_close(packed[:, 11:], run.model(x[:, 11:]), rtol=0, atol=1e-5)


def test_beams_take_their_documents_along():
    # transformers is not installed everywhere
    from scripts.common import exported_model

    cache = exported_model.Cache(8)
    cache.stored["layer"] = [torch.arange(3.0)[:, None]]
    cache.document_length = torch.tensor([[4], [5], [6]])
    cache.next_position = torch.tensor([[7], [8], [9]])
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    (stored,) = cache.stored["layer"]
    assert stored.flatten().tolist() == [2, 0, 0]
    assert cache.document_length.flatten().tolist() == [6, 4, 4]
    assert cache.next_position.flatten().tolist() == [9, 7, 7]


@torch.no_grad()
def test_positions_continue_the_cache(tmp_path):
    # transformers is not installed everywhere
    from scripts.common import exported_model

    run, model = load_in_transformers(tmp_path, "lssar_p15.py", rope="none")
    x = tokens(8)
    positions = torch.arange(8)[None]
    cache = exported_model.Cache(8)
    model(x[:, :5], past_key_values=cache, position_ids=positions[:, :5])
    with pytest.raises(ValueError, match="position_ids must count from 5"):
        model(x[:, 5:], past_key_values=cache, position_ids=positions[:, :3])
    last = model(x[:, 5:], past_key_values=cache, position_ids=positions[:, 5:]).logits
    assert_close(last, run.model(x)[:, 5:], rtol=1e-4, atol=1e-5)


def test_gradient_accumulation_changes_no_loss(tmp_path):
    run, model = load_in_transformers(tmp_path, "lssar_p15.py")
    x = tokens(16)
    arguments = transformers.TrainingArguments(
        tmp_path,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
    )
    dataset = [{"input_ids": row, "labels": row} for row in torch.cat([x] * 4)]
    trainer = transformers.Trainer(model, arguments, train_dataset=dataset)
    trainer.train()
    loss = native_loss(run, x)
    loss.backward()
    gradients = [p.grad for p in run.model.parameters()]
    norm = torch.nn.utils.get_total_norm(gradients)
    logged = trainer.state.log_history[0]
    assert logged["loss"] == pytest.approx(loss.item(), rel=1e-3)
    assert logged["grad_norm"] == pytest.approx(norm.item(), rel=1e-3)


def test_an_export_needs_torch_and_transformers_alone():
    """The loaders of data do not come along, nor what they need."""
    sources = export_hf.sources()
    assert "data_loader.py" not in sources
    libraries = set()
    for text in sources.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                libraries |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                libraries.add(node.module.partition(".")[0])
    assert libraries - sys.stdlib_module_names == {"torch", "transformers", "triton"}


def test_a_module_that_is_imported_whole_is_refused(tmp_path, monkeypatch):
    """transformers would ask for a package called attention when it loads the export."""
    (tmp_path / "scripts/common").mkdir(parents=True)
    (tmp_path / "attention.py").touch()
    code = "import math\nimport attention as formulas\n"
    (tmp_path / "scripts/common/exported_model.py").write_text(code)
    monkeypatch.setattr(export_hf, "ROOT", tmp_path)
    with pytest.raises(UserError, match="cannot contain 'import attention as formulas'"):
        export_hf.sources()


def test_odd_texts_have_the_same_ids():
    """For GPT-2's vocabulary see test_a_file_with_gpt2s_vocabulary_is_gpt2."""
    exported = export_hf.byte_level_bpe("bytes")
    exported.encode_special_tokens = True  # the end-of-text mark in a text is ordinary text
    tokenizer = get_tokenizer("bytes")
    assert exported.get_vocab_size() == tokenizer.n_vocab
    for text in [*TEXTS, *random_texts(200, 60)]:
        assert exported.encode(text).ids == tokenizer.encode(text), repr(text)


def test_the_folder_says_what_it_is(folder):
    values = json.loads((folder / "user/model0/config.json").read_text())
    assert values["run"]["variant"] == "lssar_p15"
    assert values["run"]["step"] == 7
    assert values["settings"]["p"] == 15
    assert "out_dir" not in values["settings"]
    assert str(folder) not in json.dumps(values["settings"])  # no path of the exporting machine
    exported_license = (folder / "user/model0/LICENSE").read_text()
    assert exported_license == (ROOT / "LICENSE").read_text()


def test_the_card_says_what_the_model_is_and_how_to_load_it(trained, tmp_path, capsys):
    target = tmp_path / "model"
    export(trained, target)
    printed = capsys.readouterr().out
    card = (target / "README.md").read_text()
    losses = metrics(trained, "val_loss")
    run = load_run(trained, Options(device="cpu"))
    for row in (
        f"parameters | {run.model.count_parameters():,}",
        "steps | 6",
        "tokens per step | 1,024",
        "data | shards0",
        f"validation loss in training | {losses[6]:.4f} nats per token at step 6",
        "attention | lssar",
        "p | 3.0",
        "variant | lssar_p3",
        "rope | dynamic_ntk",
    ):
        assert f"| {row} |" in card
    for key in ("qk_norm", "rope_theta", "document_mask"):
        assert f"| {key} |" not in card
    assert "from transformers import AutoModelForCausalLM, AutoTokenizer\n" in printed
    assert f'from_pretrained("{target}", trust_remote_code=True)' in printed
    assert str(tmp_path) not in card  # no path of the exporting machine
    earlier = replace(run, facts=run.facts | {"step": 3})
    assert f"{losses[3]:.4f} nats per token at step 3 |" in export_hf.model_card(earlier, "model")
    fine_tuned = replace(run, config=run.config.replace(init_from="out/earlier"))
    card = export_hf.model_card(fine_tuned, "model")
    assert "tokens per step" not in card  # its batches are padded to their longest example only
    config = run.config.replace(name="mine", window=8, qk_norm=True, p=15.0)
    facts = run.facts | {"window": 4, "rope_theta": 5e5}
    card = export_hf.model_card(replace(run, config=config, facts=facts), "model")
    assert "\n# mine\n" in card
    for row in ("qk_norm | True", "p | 15.0", "variant | lssar_p3", "window | 4"):
        assert f"| {row} |" in card
    assert "| rope_theta | 500000.0 |" in card


def test_a_checkpoint_without_its_folder_is_exported(trained, tmp_path):
    alone = tmp_path / "alone" / "mine.pt"
    alone.parent.mkdir()
    shutil.copy(checkpoint.find(trained).path, alone)
    export(alone, tmp_path / "model")
    card = (tmp_path / "model/README.md").read_text()
    assert "| variant | lssar_p3 |" in card
    assert "validation loss" not in card  # which the folder has


@torch.no_grad()
def test_another_number_of_ids_is_refused_and_changes_nothing(tmp_path):
    run, model = load_in_transformers(tmp_path, "softmax.py", rope="none")
    x = tokens(5)
    for number in (100, 256, 258, 384):
        with pytest.raises(ValueError, match=f"has 257 ids, not {number}"):
            model.resize_token_embeddings(number)
    assert model.resize_token_embeddings(257) is model.get_input_embeddings()
    assert_close(model(x).logits, run.model(x), rtol=0, atol=1e-6)


def test_no_layer_is_put_on_another_gpu(tmp_path):
    """By device_map="auto" on two GPUs, the first without room for all weights."""
    accelerate = pytest.importorskip("accelerate")
    _, model = load_in_transformers(tmp_path, "softmax.py")
    size = model.get_memory_footprint()
    devices = accelerate.infer_auto_device_map(
        model,
        max_memory={0: size * 7 // 10, 1: 2 * size},
        no_split_module_classes=model._no_split_modules,
    )
    assert set(devices) == {"gpt"}


def test_a_model_without_end_of_text_is_refused(tmp_path, refused):
    run = open_run(tmp_path / "run", "softmax.py --vocab_size=256")
    says = "needs end-of-text, id 256 of tokenizer = 'bytes', but vocab_size = 256 leaves it out"
    refused(export, run.path, tmp_path / "hf", says=says)
    assert not (tmp_path / "hf").exists()


def test_a_run_of_any_schedule_is_exported(tmp_path):
    """Its warm-up may be longer than the default number of steps."""
    schedule = "--schedule=trapezoidal --warmup_iters=20000 --max_iters=60000"
    run, model = load_in_transformers(tmp_path, f"softmax.py {schedule}", rope="none")
    x = tokens(5)
    assert_close(model(x).logits, run.model(x), rtol=0, atol=1e-6)


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def test_a_folder_is_whole_or_not_there(tmp_path, folder, monkeypatch, refused):
    def fails():
        raise OSError("No space left on device")

    target = tmp_path / "new/model"
    with monkeypatch.context() as patch:
        patch.setattr(export_hf, "sources", fails)
        says = "model cannot be written: No space left on device"
        refused(export, folder / "run0", target, says=says)
    assert not list(target.parent.iterdir())
    target.mkdir()  # an empty one is as good as none
    export(folder / "run0", target)
    assert names_in(target) == names_in(folder / "user/model0")
    assert list(target.parent.iterdir()) == [target]
    refused(export, folder / "run0", target, says="is not an empty folder")
