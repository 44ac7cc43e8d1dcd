import pytest
import torch

from data.tokenizer import load_tokenizer
from model.checkpoint import AtomicCheckpointIO
from model.gpt import GPT
from model.hf import export_gpt2, load_gpt2
from model.warm_start import load_into
from scripts.convert_checkpoint import main

SIZES = {"max_seqlen": 24, "depth": 2, "dim": 8, "nheads": 2}


def make_gpt(seed=0, **changes):
    torch.manual_seed(seed)
    model = GPT(**{**SIZES, **changes})
    with torch.no_grad():
        for param in model.parameters():
            param += 0.3 * torch.randn_like(param)
        model.head_weight[model.vocab_size :] = 0.0
    return model.eval()


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
