import pytest
import torch

from data.tokenizer import load_tokenizer
from model.bert import BERT
from model.bert_files import load_bert
from model.checkpoint import AtomicCheckpointIO
from model.gpt import GPT
from model.hf import export_gpt2, load_gpt2
from model.warm_start import load_into
from scripts.convert_checkpoint import main
from tests.training import randomize

SIZES = {"max_seqlen": 24, "depth": 2, "dim": 8, "nheads": 2}


def make_gpt(seed=0, **changes):
    torch.manual_seed(seed)
    model = randomize(GPT(**{**SIZES, **changes}), scale=0.3)
    with torch.no_grad():
        model.head_weight[model.vocab_size :] = 0.0
    return model


def make_bert(seed=0, **changes):
    torch.manual_seed(seed)
    model = randomize(BERT(**{**SIZES, **changes}), scale=0.1)
    with torch.no_grad():
        model.head_weight[model.vocab_size :] = 0.0
        model.mlm.bias[model.vocab_size :] = 0.0
    return model


ROBERTA = {"num_segments": 1, "position_offset": 2, "norm_eps": 1e-5}
ROBERTA |= {"nsp_head": False, "pooler": False}


@pytest.fixture
def roberta_tokenizer(tmp_path):
    """A folder with a small byte-level BPE in RoBERTa's files: (folder, vocabulary size)."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(["the sea and the whale"] * 9, 280, special_tokens=special)
    trained.save_model(str(tmp_path))
    vocab, merges = str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")
    made = transformers.RobertaTokenizerFast(vocab_file=vocab, merges_file=merges)
    made.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer", len(made)


def make_run(folder, model):
    (folder / "checkpoints").mkdir(parents=True)
    checkpoint = {
        "global_step": 3,
        "state_dict": {f"model.{key}": value for key, value in model.state_dict().items()},
        "model_config": model.config,
    }
    AtomicCheckpointIO().save_checkpoint(checkpoint, folder / "checkpoints" / "step-00000003.ckpt")
    return folder


def test_run_becomes_a_folder_that_transformers_uses(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = make_gpt()
    main(["to_hf", f"run={make_run(tmp_path / 'run', model)}", f"out={tmp_path / 'hf'}"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "Fellow citizens of the Senate"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == load_tokenizer().encode(text)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=0, atol=1e-4)
    assert tokenizer.model_max_length == 24 and theirs.config.eos_token_id == 50256
    write = transformers.pipeline("text-generation", str(tmp_path / "hf"), device="cpu")
    written = write(text, max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert written.startswith(text) and len(written) > len(text)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_bert_fills_masks_in_transformers(kind, tmp_path, roberta_tokenizer, capsys):
    transformers = pytest.importorskip("transformers")
    folder, vocab_size = roberta_tokenizer
    model = make_bert(**({**ROBERTA, "vocab_size": vocab_size} if kind == "roberta" else {}))
    arguments = ["to_hf", f"run={make_run(tmp_path / 'run', model)}", f"out={tmp_path / 'hf'}"]
    main([*arguments, *([f"tokenizer={folder}"] if kind == "roberta" else [])])
    name = "RobertaForMaskedLM" if kind == "roberta" else "BertForPreTraining"
    assert f"{name} of {model.num_params():,} parameters" in capsys.readouterr().out
    fill = transformers.pipeline("fill-mask", str(tmp_path / "hf"), device="cpu")
    tokenizer = fill.tokenizer
    assert tokenizer.model_max_length == 24
    text = f"The sea and the {tokenizer.mask_token}."
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    where = (ids[0] == tokenizer.mask_token_id).nonzero()[0]
    assert ids[0, 0] == tokenizer.cls_token_id and ids[0, -1] == tokenizer.sep_token_id
    with torch.no_grad():
        probs = model.mlm_logits(model.hidden(ids), where)[0].softmax(-1)
    for entry in fill(text, top_k=3):
        assert entry["score"] == pytest.approx(float(probs[entry["token"]]), rel=1e-4)
    best = fill(text)[0]
    assert best["token"] == int(probs.argmax())
    assert best["token_str"].strip() == tokenizer.decode([best["token"]]).strip()


@pytest.mark.parametrize("changes", [{"vocab_size": 99}, {**ROBERTA, "vocab_size": 99}])
def test_bert_goes_there_and_back(changes, tmp_path, capsys):
    model = make_bert(**changes)
    run = make_run(tmp_path / "run", model)
    main(["to_hf", f"run={run}", f"out={tmp_path / 'hf'}", "tokenizer=none"])
    out = tmp_path / "init.safetensors"
    main(["from_hf", f"hf={tmp_path / 'hf'}", f"out={out}"])
    assert f"init_from={out}" in capsys.readouterr().out
    again = load_bert(out)
    assert again.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    started = make_bert(1, **changes)
    assert load_into(started, out) == ([], [])
    main(["from_hf", f"hf={tmp_path / 'hf'}", f"out={out}", "max_seqlen=40", "overwrite=true"])
    assert load_bert(out).max_seqlen == 40


def test_tokenizer_must_be_the_models(tmp_path, capsys):
    run = make_run(tmp_path / "run", make_bert(vocab_size=99))
    for option, message in (
        ("tokenizer=auto", "must be the 30522 tokens of bert-base-uncased, got 99"),
        ("tokenizer=gpt2", "must be the 50257 tokens of gpt2, got 99"),
        (f"tokenizer={tmp_path}/none", "or a folder with tokenizer_config.json"),
    ):
        with pytest.raises(SystemExit):
            main(["to_hf", f"run={run}", f"out={tmp_path / 'hf'}", option])
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert not (tmp_path / "hf").exists()


def test_hf_model_becomes_a_file_to_start_from(tmp_path, capsys):
    source = make_gpt(inverse_layer_scale=True, vocab_size=99)
    export_gpt2(source, tmp_path / "hf")
    out = tmp_path / "sub" / "init.safetensors"
    main(["from_hf", f"hf={tmp_path / 'hf'}", f"out={out}", "max_seqlen=40"])
    assert f"init_from={out}" in capsys.readouterr().out
    loaded = load_gpt2(out)
    assert loaded.max_seqlen == 40
    model = make_gpt(1, inverse_layer_scale=True, vocab_size=99, max_seqlen=48, vocab_multiple=64)
    load_into(model, out)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids), source(ids))


def test_existing_model_is_kept_unless_told(tmp_path, capsys):
    run = make_run(tmp_path / "run", make_gpt(vocab_size=99))
    arguments = ["to_hf", f"run={run}", f"out={tmp_path / 'hf'}", "tokenizer=none"]
    main(arguments)
    assert not (tmp_path / "hf" / "vocab.json").exists()
    with pytest.raises(SystemExit):
        main(arguments)
    assert "must not exist yet; pass overwrite=true" in capsys.readouterr().err
    main([*arguments, "overwrite=true"])


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["convert"], "the first word must be to_hf or from_hf, got 'convert'"),
        (["to_hf", "run=x"], "out=... is required"),
        (["from_hf", "hf=x", "out=y", "which=best"], "there is no option which"),
        (["from_hf", "hf=HF", "out=weights.pt"], "must end in .safetensors"),
        (["to_hf", "run=no_such_run", "out=x"], "no run at no_such_run"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, arguments, message, capsys):
    export_gpt2(make_gpt(vocab_size=99), tmp_path)
    with pytest.raises(SystemExit) as caught:
        main([argument.replace("hf=HF", f"hf={tmp_path}") for argument in arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_help_lists_the_verbs(capsys):
    main(["--help"])
    assert "to_hf" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["from_hf", "--help"])
    assert caught.value.code == 0
    assert "repeat the position table" in capsys.readouterr().out
