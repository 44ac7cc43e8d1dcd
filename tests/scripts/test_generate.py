import pytest
import torch

from data.tokenizer import load_tokenizer
from model.checkpoint import AtomicCheckpointIO
from model.generation import generate
from model.gpt import GPT
from model.hf import export_gpt2, load_gpt2
from scripts.generate import main
from tests.training import randomize

PROMPT = "Fellow citizens: the state"


def make_gpt(**changes):
    torch.manual_seed(0)
    model = GPT(**{"max_seqlen": 32, "depth": 1, "dim": 8, "nheads": 2, **changes})
    return randomize(model, scale=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, and the same model in Hugging Face's layout."""
    folder = tmp_path_factory.mktemp("generate")
    model = make_gpt()
    export_gpt2(model, folder / "hf")
    (folder / "run" / "checkpoints").mkdir(parents=True)
    checkpoint = {
        "global_step": 3,
        "state_dict": {f"model.{key}": value for key, value in model.state_dict().items()},
        "model_config": model.config,
    }
    path = folder / "run" / "checkpoints" / "step-00000003.ckpt"
    AtomicCheckpointIO().save_checkpoint(checkpoint, path)
    return folder


def run(capsys, *arguments):
    main([*arguments, "device=cpu", "max_new_tokens=12"])
    return capsys.readouterr().out


def test_greedy_text_is_the_models(folder, capsys):
    tokenizer = load_tokenizer()
    model = load_gpt2(folder / "hf").eval()
    ids = torch.tensor([tokenizer.encode(PROMPT)])
    expected = tokenizer.decode(generate(model, ids, 12, temperature=0.0)[0].tolist())
    for source in (f"hf={folder}/hf", f"run={folder}/run"):
        assert run(capsys, source, f"prompt={PROMPT}", "temperature=0") == expected + "\n"


def test_seed_decides_the_samples(folder, capsys):
    arguments = [f"run={folder}/run", f"prompt={PROMPT}", "num_samples=2", "top_k=none"]
    first = run(capsys, *arguments, "seed=1")
    assert first == run(capsys, *arguments, "seed=1")
    assert first != run(capsys, *arguments, "seed=2")
    samples = first.removesuffix("\n").split("\n\n---\n\n")
    assert len(samples) == 2 and samples[0] != samples[1]
    assert all(text.startswith(PROMPT) for text in samples)


def test_stop_ends_a_sample_before_its_end_of_text(folder, capsys, monkeypatch):
    eot, hello = load_tokenizer().eot, load_tokenizer().encode(" hello")

    def fake(model, input_ids, max_new_tokens, *, eos_id, **options):
        new = torch.tensor([[*hello, eot, eot], [*hello, *hello, *hello]])
        assert eos_id in (eot, None)
        return torch.cat([input_ids, new], 1)

    monkeypatch.setattr("scripts.generate.generate", fake)
    arguments = [f"hf={folder}/hf", "prompt=Oh", "num_samples=2"]
    assert run(capsys, *arguments) == "Oh hello\n\n---\n\nOh hello hello hello\n"
    kept = run(capsys, *arguments, "stop=false")
    assert kept.startswith("Oh hello<|endoftext|><|endoftext|>\n")


def test_prompt_may_be_empty_or_longer_than_the_context(folder, capsys):
    assert run(capsys, f"hf={folder}/hf", "temperature=0").strip()
    long = "a b c " * 40
    out = run(capsys, f"hf={folder}/hf", f"prompt={long}", "temperature=0")
    assert out.startswith(long) and len(out) > len(long) + 5


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([], "one of run=... and hf=..."),
        (["run=a", "hf=b"], "one of run=... and hf=..."),
        (["run=no_such_run"], "no run at no_such_run"),
        (["hf=HF", "temperature=-1"], "temperature must be at least 0"),
        (["hf=HF", "num_samples=0"], "num_samples must be at least 1"),
        (["hf=HF", "attention=magic"], "attention must be one of auto, sdpa, got 'magic'"),
        (["hf=HF", "tokenizer=none"], "tokenizer must be one of"),
        (["hf=HF", "tokens=4"], "there is no option tokens"),
    ],
)
def test_mistakes_end_in_one_line(folder, arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main([argument.replace("hf=HF", f"hf={folder}/hf") for argument in arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_another_vocabulary_is_refused(tmp_path, capsys):
    export_gpt2(make_gpt(vocab_size=99), tmp_path)
    with pytest.raises(SystemExit):
        main([f"hf={tmp_path}", "device=cpu"])
    assert "must be the tokenizer's 50257 tokens, got 99" in capsys.readouterr().err
