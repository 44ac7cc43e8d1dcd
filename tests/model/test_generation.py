import pytest
import torch

from model.attention import sdpa_attention
from model.generation import context_start, generate
from model.gpt import GPT
from tests.training import randomize


def make_gpt(max_seqlen=16, depth=2):
    """Weights wide enough that the text does not repeat one token."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "dim": 24, "nheads": 3, "max_seqlen": max_seqlen, "depth": depth}
    return randomize(GPT(**sizes, attention=sdpa_attention), scale=0.5)


def make_ids(seqlen=3, batch=2):
    return torch.randint(0, 61, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def make_generator():
    return torch.Generator().manual_seed(5)


def test_greedy_is_transformers_greedy(tmp_path):
    transformers = pytest.importorskip("transformers")
    from model.hf import export_gpt2

    ours = make_gpt(max_seqlen=32)
    export_gpt2(ours, tmp_path)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    ids = make_ids(5)
    out = generate(ours, ids, 27, temperature=0.0)
    expected = theirs.generate(
        ids, max_new_tokens=27, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    assert torch.equal(out, expected)
    assert len(out[0, 5:].unique()) > 5


@pytest.mark.parametrize("seqlen,max_new_tokens", [(1, 15), (3, 13), (10, 40), (16, 5), (40, 20)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cache_changes_nothing_also_beyond_max_seqlen(seqlen, max_new_tokens, temperature):
    model, ids = make_gpt(), make_ids(seqlen)
    outs = [
        generate(
            model,
            ids,
            max_new_tokens,
            temperature=temperature,
            generator=make_generator(),
            use_cache=use_cache,
        )
        for use_cache in (True, False)
    ]
    assert outs[0].shape == (2, seqlen + max_new_tokens)
    assert torch.equal(outs[0][:, :seqlen], ids)
    assert torch.equal(*outs)


def test_cache_feeds_one_token_a_step_and_refills_once_a_stride():
    model, fed = make_gpt(), []
    hidden = model.hidden

    def spy(input_ids, **options):
        fed.append(input_ids.shape[1])
        return hidden(input_ids, **options)

    model.hidden = spy
    generate(model, make_ids(10), 24, temperature=0.0)
    # 10 tokens, one each up to 16; then 9 of 17 and one each up to 16 again, twice more.
    assert fed == [10, *[1] * 6, 9, *[1] * 7, 9, *[1] * 7, 9][:24]


@pytest.mark.parametrize(
    "max_seqlen,starts", [(4, [0, 0, 0, 0, 2, 2, 4, 4]), (3, [0, 0, 0, 2, 2, 4]), (1, [0, 1, 2])]
)
def test_context_start(max_seqlen, starts):
    assert [context_start(n, max_seqlen) for n in range(1, len(starts) + 1)] == starts


class Fixed(GPT):
    """The same next-token probabilities everywhere."""

    def __init__(self, probs):
        super().__init__(vocab_size=len(probs), max_seqlen=8, depth=1, dim=2, nheads=1)
        self.log_probs = torch.tensor(probs).log()

    def logits(self, hidden):
        return self.log_probs.expand(*hidden.shape[:-1], -1)


def frequencies(probs, **options):
    ids = torch.zeros(4000, 1, dtype=torch.long)
    drawn = generate(Fixed(probs), ids, 1, generator=make_generator(), **options)[:, 1]
    return (drawn.bincount(minlength=len(probs)) / 4000).tolist()


PROBS = [0.1, 0.4, 0.2, 0.3]


@pytest.mark.parametrize(
    "options,expected",
    [
        ({}, PROBS),
        ({"temperature": 0.5}, [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 9}, PROBS),
        ({"top_p": 0.35}, [0, 1, 0, 0]),
        ({"top_p": 0.65}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.75}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1.0}, PROBS),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_draws_follow_the_asked_distribution(options, expected):
    # Five standard deviations of a frequency over 4000 draws are below 0.04.
    assert frequencies(PROBS, **options) == pytest.approx(expected, abs=0.04)


def test_finished_rows_are_filled_and_all_finished_stops():
    model, ids = make_gpt(), make_ids()
    free = generate(model, ids, 12, temperature=0.0)
    eos_id = free[0, 5].item()
    seen = []
    out = generate(model, ids, 12, temperature=0.0, eos_id=eos_id, on_token=seen.append)
    ends = [(row[3:] == eos_id).nonzero()[0, 0].item() if eos_id in row[3:] else 11 for row in free]
    assert out.shape[1] == 3 + max(ends) + 1
    for row, free_row, end in zip(out, free, ends, strict=True):
        assert torch.equal(row[: 3 + end + 1], free_row[: 3 + end + 1])
        assert row[3 + end + 1 :].eq(eos_id).all()
    assert torch.equal(torch.stack(seen, 1), out[:, 3:])
    alone = generate(model, ids[:1], 12, temperature=0.0, eos_id=eos_id)
    assert alone.shape[1] < 15 and alone[0, -1] == eos_id


def test_seed_decides_and_the_global_generator_is_untouched():
    model, ids = make_gpt(), make_ids()
    state = torch.get_rng_state()
    outs = [generate(model, ids, 8, generator=make_generator()) for _ in range(2)]
    assert torch.equal(*outs) and torch.equal(state, torch.get_rng_state())
    other = generate(model, ids, 8, generator=torch.Generator().manual_seed(6))
    assert not torch.equal(outs[0], other)


def test_mode_of_the_model_is_restored():
    model = make_gpt().train()
    assert torch.equal(
        *(generate(model, make_ids(), 8, temperature=0.0) for _ in range(2))
    )  # no dropout
    assert model.training
    assert torch.equal(generate(model, make_ids(), 0), make_ids())


@pytest.mark.parametrize(
    "options,message",
    [
        ({"temperature": -1.0}, "temperature must be at least 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature must be at least 0, got nan"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0, got -1"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "a token to start from"),
        ({"input_ids": torch.tensor([[3, 61]])}, r"in \[0, 61\), got 3 to 61"),
    ],
)
def test_arguments_are_checked(options, message):
    arguments = {"input_ids": make_ids(), "max_new_tokens": 2, **options}
    with pytest.raises(ValueError, match=message):
        generate(make_gpt(), **arguments)


@pytest.mark.parametrize("seqlen", [3, 18])
def test_flash_decodes_through_its_own_cache_kernels(seqlen, monkeypatch):
    """Prompts of up to 16 tokens and every later token; beyond max_seqlen the cache is refilled."""
    flash_kernels = pytest.importorskip("flash_kernels")
    decoded, decode = [], flash_kernels.flash_attention_with_kv_cache

    def spy(q, *args, **options):
        decoded.append(q.shape[1])
        return decode(q, *args, **options)

    monkeypatch.setattr(flash_kernels, "flash_attention_with_kv_cache", spy)
    model, ids = make_gpt(max_seqlen=20), make_ids(seqlen)
    expected = generate(model, ids, 8, temperature=0.0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    for block in model.blocks:
        block.attention.attention = flash_kernels.flash_attention
    assert torch.equal(generate(model, ids.to(device), 8, temperature=0.0).cpu(), expected)
    steps = len(decoded) // 2  # two layers
    assert decoded.count(1) >= 2 * 5 and steps == 8 - (seqlen > 16)
