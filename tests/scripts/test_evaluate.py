"""scripts/evaluate.py on models whose every score follows from arithmetic."""

import json
import math
import shlex
from pathlib import Path

import pytest
import torch

from data.causal_lm import CausalLMData
from data.streamed_text import StreamedTextData
from data.tokenizer import load_tokenizer
from model.checkpoint import AtomicCheckpointIO
from model.gpt import GPT
from model.hf import export_gpt2
from scripts.arguments import parse_arguments
from scripts.evaluate import VERBS, main
from tests.training import randomize

VOCAB = 50257
CAT = 5.0  # logit of " cat" in the model that favours it; all others are 0
LOG_Z = math.log(VOCAB - 1 + math.exp(CAT))


def unigram_gpt(**logits):
    """Gives each token the same logit whatever is before it: 0, or what `logits` says."""
    model = GPT(max_seqlen=32, depth=1, dim=8, nheads=2)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
        model.norm.bias[0] = 1.0
        for word, logit in logits.items():
            (token,) = load_tokenizer().encode(" " + word)
            model.head_weight[token, 0] = logit
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two models in Hugging Face's layout, and ten documents of ten words each."""
    folder = tmp_path_factory.mktemp("evaluate")
    export_gpt2(unigram_gpt(), folder / "uniform")
    export_gpt2(unigram_gpt(cat=CAT), folder / "cats")
    rows = [{"text": f"number {i} is a document of ten short words ."} for i in range(10)]
    write(folder / "texts.jsonl", rows)
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder, *arguments):
    """The record of a command."""
    arguments = [a.replace("DIR", str(folder)) for a in arguments]
    main([*arguments, f"out={folder}/record.json", "device=cpu"])
    return json.loads((folder / "record.json").read_text())


def test_perplexity_of_a_uniform_model_is_its_vocabulary_at_any_context(folder, capsys):
    record = run(
        folder, "perplexity", "hf=DIR/uniform", "source=DIR/texts.jsonl", "root=DIR/data",
        "context=4,8,32", "stride=3",
    )  # fmt: skip
    texts = [json.loads(line)["text"] for line in open(folder / "texts.jsonl")]
    num_tokens = sum(len(load_tokenizer().encode(text)) + 1 for text in texts)  # an end of text
    num_bytes = sum(len(text) for text in texts)
    assert [row["seqlen"] for row in record["rows"]] == [4, 8, 32]
    for row in record["rows"]:
        assert row["tokens"] == num_tokens and row["stride"] == 3
        assert row["same_target_ppl"] == pytest.approx(VOCAB, rel=1e-5)
        # The store's documents follow each other: " ." and "number" touch, so 9 words are glued.
        assert row["word_ppl"] == pytest.approx(VOCAB ** (num_tokens / (10 * 10 - 9)), rel=1e-4)
        assert row["bits_per_byte"] == pytest.approx(num_tokens * math.log2(VOCAB) / num_bytes)
    assert record["name"] == "evaluate_perplexity" and record["settings"]["split"] == "all"
    assert record["command"].startswith("python -m scripts.evaluate")
    assert {"git_revision", "versions", "hardware", "date"} <= record.keys()
    assert str(folder) not in json.dumps(record["rows"]) + json.dumps(record["settings"])
    assert "perplexity 50257.0" in capsys.readouterr().out


def test_documents_alone_and_their_first_tokens_unscored(folder):
    arguments = ["perplexity", "hf=DIR/cats", "source=DIR/texts.jsonl", "root=DIR/data"]
    alone = run(folder, *arguments, "cross_documents=false", "skip=5")
    per_document = len(load_tokenizer().encode("number 0 is a document of ten short words ."))
    (row,) = alone["rows"]
    assert row["tokens"] == 10 * (per_document + 1 - 5)
    assert row["loss"] == pytest.approx(LOG_Z, rel=1e-5), "no cat among them"
    assert alone["settings"]["documents"] == 10
    assert (row["seqlen"], row["stride"]) == (32, 16), "the model's positions, and half of them"
    limited = run(folder, *arguments, "tokens_limit=7")
    assert limited["rows"][0]["tokens"] == 7


def make_run(folder, name, **data):
    checkpoints = folder / name / "checkpoints"
    checkpoints.mkdir(parents=True)
    model = unigram_gpt()
    checkpoint = {
        "global_step": 1,
        "state_dict": {f"model.{key}": value for key, value in model.state_dict().items()},
        "model_config": model.config,
    }
    AtomicCheckpointIO().save_checkpoint(checkpoint, checkpoints / "step-00000001.ckpt")
    (folder / name / "config.yaml").write_text(json.dumps({"data": data}))  # JSON is YAML


def test_a_run_is_scored_on_what_it_held_out(folder):
    settings = {
        "source": str(folder / "texts.jsonl"),
        "val_fraction": 0.3,
        "root": str(folder / "data"),
    }
    make_run(folder, "held", **settings)
    data = CausalLMData(seqlen=4, batch_tokens=4, **settings)
    data.prepare_data()
    data.setup()
    assert 0 < data.num_val_tokens < data.num_train_tokens
    for more in ([], ["source=DIR/texts.jsonl", "root=DIR/data"]):
        record = run(folder, "perplexity", "run=DIR/held", *more)
        assert record["rows"][0]["tokens"] == data.num_val_tokens
        assert record["settings"]["split"] == "held out"
        assert record["settings"]["store"] == data.store.fingerprint
    store = run(folder, "perplexity", "hf=DIR/uniform", f"source={data.store.folder}")
    assert store["rows"][0]["tokens"] == data.num_val_tokens


def test_a_run_on_a_stream_is_scored_on_what_it_held_out(folder, capsys):
    settings = {
        "source": str(folder / "texts.jsonl"),
        "val_fraction": 0.3,
        "root": str(folder / "data"),
        "stream_tokens": 240,
    }
    make_run(folder, "streamed", **settings)
    data = StreamedTextData(seqlen=4, batch_tokens=4, **settings)
    data.prepare_data()
    data.setup()
    with pytest.raises(SystemExit):
        run(folder, "perplexity", "run=DIR/streamed")
    assert "the run read a stream, whose text is not kept: give source=" in capsys.readouterr().err
    record = run(folder, "perplexity", "run=DIR/streamed", f"source={data.store.folder}")
    assert record["rows"][0]["tokens"] == data.num_val_tokens > 0
    assert record["settings"]["split"] == "held out"


def test_stride_of_the_context_is_the_validation_of_a_run(folder):
    """The data module's own batches, and a model that needs its context."""
    torch.manual_seed(0)
    model = randomize(GPT(max_seqlen=8, depth=1, dim=8, nheads=2), scale=0.5)
    export_gpt2(model, folder / "random")
    options = {"source": str(folder / "texts.jsonl"), "val_fraction": 0.3}
    data = CausalLMData(
        seqlen=8, batch_tokens=8, val_tokens_limit=24, root=str(folder / "data"), **options
    )
    data.prepare_data()
    data.setup()
    losses = []
    for batch in data.val_dataloader():
        with torch.no_grad():
            log_p = model(batch["input_ids"]).double().log_softmax(-1)
        is_label = batch["labels"] != -100
        losses.append(-log_p[is_label].gather(1, batch["labels"][is_label][:, None]).flatten())
    arguments = ["source=DIR/texts.jsonl", "val_fraction=0.3", "tokens_limit=24", "stride=8"]
    (row,) = run(folder, "perplexity", "hf=DIR/random", "root=DIR/data", *arguments)["rows"]
    assert row["tokens"] == 24 == len(torch.cat(losses))
    assert row["loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)


def test_lambada_counts_greedy_words_and_their_perplexity(folder):
    last = ("cat", "cat", "dog", "house")
    write(folder / "lambada.jsonl", [{"text": f"It was a cat, she thought, a {w}"} for w in last])
    record = run(folder, "lambada", "hf=DIR/cats", "source=DIR/lambada.jsonl")
    (row,) = record["rows"]
    assert row["accuracy"] == 0.5 and row["num_examples"] == 4
    # Two words of log Z - 5 nats, two of log Z.
    assert row["ppl"] == pytest.approx(math.exp(LOG_Z - CAT / 2), rel=1e-4)
    assert row["ci95"] == pytest.approx(1.96 * math.sqrt(0.5 * 0.5 / 4))
    limited = run(folder, "lambada", "hf=DIR/cats", "source=DIR/lambada.jsonl", "limit=2")
    assert limited["rows"][0]["accuracy"] == 1.0


def test_hellaswag_by_likelihood_and_per_character(folder):
    """A cat takes 10.8 - 5 = 5.8 nats, 1.9 a character; the long word 10.8 nats, 0.7."""
    long = "internationally"
    assert len(load_tokenizer().encode(" " + long)) == 1 and LOG_Z / 15 < (LOG_Z - CAT) / 3
    common = {"activity_label": "Pets", "ctx_a": "She saw a", "ctx_b": ""}
    rows = [
        {**common, "endings": [long, "cat"], "label": "1"},
        {**common, "endings": [long, "cat"], "label": 0},
        {**common, "endings": ["cat", "dog"], "label": 0},
        {**common, "endings": ["ox", "cat"], "label": 1},
    ]
    write(folder / "hellaswag.jsonl", rows)
    (row,) = run(folder, "hellaswag", "hf=DIR/cats", "source=DIR/hellaswag.jsonl")["rows"]
    assert (row["accuracy"], row["accuracy_norm"]) == (0.75, 0.75)
    write(folder / "hellaswag.jsonl", [rows[0], rows[2], rows[3]])
    (row,) = run(folder, "hellaswag", "hf=DIR/cats", "source=DIR/hellaswag.jsonl")["rows"]
    assert row["accuracy"] == 1.0 and row["accuracy_norm"] == pytest.approx(2 / 3)


def test_wikitexts_words_are_those_of_the_file(folder):
    lines = " \n = Cats = \n \n A cat , a cat @-@ like dog . \n"
    (folder / "wiki.test.raw").write_text(lines)
    (row,) = run(folder, "wikitext", "hf=DIR/uniform", "source=DIR/wiki.test.raw")["rows"]
    text = "\n= Cats =\n\nA cat, a cat-like dog.\n"
    assert row["tokens"] == len(load_tokenizer().encode(text))
    num_words = 3 + 9 + 4
    assert row["word_ppl"] == pytest.approx(VOCAB ** (row["tokens"] / num_words), rel=1e-4)


def test_a_longer_context_needs_positions(folder, capsys):
    arguments = ["perplexity", "hf=DIR/uniform", "source=DIR/texts.jsonl", "root=DIR/data"]
    with pytest.raises(SystemExit):
        run(folder, *arguments, "context=64")
    assert "32 positions; shorten it, or set extend_positions=tile" in capsys.readouterr().err
    (row,) = run(folder, *arguments, "context=64", "extend_positions=tile")["rows"]
    assert row["seqlen"] == 64 and row["same_target_ppl"] == pytest.approx(VOCAB, rel=1e-5)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["accuracy"], "must be one of perplexity, wikitext, lambada, hellaswag, got 'accuracy'"),
        (["perplexity"], "one of run=... and hf=..."),
        (["perplexity", "hf=DIR/uniform"], "source=... is required"),
        (["perplexity", "hf=DIR/uniform", "source=DIR/none"], "must be an existing file or folder"),
        (["perplexity", "hf=DIR/uniform", "source=DIR/texts.jsonl", "context=1k"], "'1k'"),
        (["perplexity", "hf=DIR/uniform", "source=DIR/texts.jsonl", "skip=-1"], "negative, got -1"),
        (["perplexity", "hf=DIR/uniform", "source=DIR/texts.jsonl", "stride=33"], "got 33"),
        (["perplexity", "run=DIR/all"], "the run held nothing out: give source=..."),
        (["lambada", "hf=DIR/uniform", "source=DIR/none.jsonl"], "source must be hf or a .jsonl"),
        (["lambada", "hf=DIR/uniform", "context=8"], "there is no option context"),
    ],
)
def test_mistakes_end_in_one_line(folder, arguments, message, capsys):
    if "run=DIR/all" in arguments:
        settings = {"source": str(folder / "texts.jsonl"), "root": str(folder / "data")}
        make_run(folder, "all", val_fraction=0.0, **settings)
    arguments = [a.replace("DIR", str(folder)) for a in arguments]
    if "perplexity" in arguments and len(arguments) > 2:
        arguments.append(f"root={folder}/data")
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_record_goes_where_the_help_says(folder, capsys, monkeypatch, tmp_path):
    main(["--help"])
    assert "outputs/evaluate/" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    write(folder / "lambada.jsonl", [{"text": "a cat"}])
    main(["lambada", f"hf={folder}/cats", f"source={folder}/lambada.jsonl", "device=cpu"])
    path = tmp_path / "outputs" / "evaluate" / "lambada-cats.json"
    assert json.loads(path.read_text())["rows"][0]["accuracy"] == 1.0
    for verb in VERBS:
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        assert "source=" in capsys.readouterr().out


def test_commands_of_the_readme_have_their_options():
    lines = (Path(__file__).parents[2] / "README.md").read_text().splitlines()
    commands = [line for line in lines if line.startswith("python -m scripts.evaluate")]
    assert {shlex.split(line, comments=True)[3] for line in commands} == set(VERBS)
    for line in commands:
        verb, *arguments = shlex.split(line, comments=True)[3:]
        parse_arguments(VERBS[verb][0], arguments, "")
