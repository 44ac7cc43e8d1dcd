import pytest
import torch

from model.attention import reference_attention, sdpa_attention
from model.gpt import GPT
from model.loss import next_token_loss
from model.self_attention import KVCache

TINY = {"vocab_size": 61, "max_seqlen": 16, "depth": 2, "dim": 24, "nheads": 3}


def make_gpt(**changes):
    torch.manual_seed(0)
    return GPT(**{**TINY, "attention": sdpa_attention, **changes})


def make_ids(seqlen=16, batch=2):
    return torch.randint(0, 61, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def test_gpt2_small_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = GPT(depth=12, dim=768, nheads=12, vocab_multiple=1)
    assert model.num_params() == 124_439_808
    assert model.num_params(positions=False) == 124_439_808 - 1024 * 768


@pytest.mark.parametrize(
    "depth,dim,seqlen,full,causal",  # GFLOP per trained token at 50304 rows, worked out by hand
    [
        (12, 768, 1024, 0.855, 0.799),
        (12, 768, 16384, 2.554, 1.648),
        (24, 1024, 4096, 3.331, 2.727),
    ],
)
def test_flops_per_token(depth, dim, seqlen, full, causal):
    with torch.device("meta"):
        model = GPT(depth=depth, dim=dim, nheads=dim // 64, max_seqlen=seqlen)
    flops = model.flops_per_token(seqlen)
    assert flops["full"] / 1e9 == pytest.approx(full, abs=6e-4)
    assert flops["causal"] / 1e9 == pytest.approx(causal, abs=6e-4)


def test_init_follows_gpt2():
    model = make_gpt(dim=96, depth=8)
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            assert param.eq(0).all(), name
        elif "norm" in name:
            assert param.eq(1).all(), name
        else:
            rows = param[:61] if "tokens" in name else param
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            expected = 0.02 / (16**0.5 if residual else 1)
            assert rows.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(rows.mean().item()) < 0.1 * expected, name


@pytest.mark.parametrize("vocab_multiple,rows", [(1, 61), (8, 64), (64, 64), (128, 128)])
def test_padding_rows_never_matter(vocab_multiple, rows):
    model = make_gpt(vocab_multiple=vocab_multiple).eval()
    ids, labels = make_ids(), make_ids(batch=2).roll(1, 1)
    assert model.head_weight.shape == (rows, 24)
    logits = model(ids)
    assert logits.shape == (2, 16, 61)
    loss, _ = next_token_loss(logits, labels)
    loss.backward()
    assert model.head_weight.grad[61:].eq(0).all()
    assert model.head_weight.grad[:61].ne(0).any(1).all()
    with torch.no_grad():
        model.head_weight[61:] = 1e4
    again, _ = next_token_loss(model(ids), labels)
    assert torch.equal(loss, again)


def test_model_is_causal():
    model, ids = make_gpt().eval(), make_ids()
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    with torch.no_grad():
        before, after = model(ids), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] - after[:, 9:]).abs().amax(-1).gt(0).all()


def test_inverse_layer_scale_divides_by_the_layer_number():
    scales = []

    def spy(q, k, v, **options):
        scales.append(options["softmax_scale"])
        return sdpa_attention(q, k, v, **options)

    make_gpt(depth=3, attention=spy, inverse_layer_scale=True)(make_ids())
    assert scales == pytest.approx([8**-0.5, 8**-0.5 / 2, 8**-0.5 / 3])


@pytest.mark.parametrize("where", ["embd_dropout", "resid_dropout", "attn_dropout"])
def test_each_dropout_acts_in_training_only(where):
    off = {"embd_dropout": 0.0, "resid_dropout": 0.0, "attn_dropout": 0.0}
    model, ids = make_gpt(**{**off, where: 0.5}), make_ids()
    plain = make_gpt(**off)(ids)
    assert not torch.allclose(model.train()(ids), plain)
    torch.testing.assert_close(model.eval()(ids), plain)


@pytest.mark.parametrize("inverse_layer_scale", [False, True])
def test_attention_is_a_choice_that_changes_nothing(inverse_layer_scale):
    ids, outs = make_ids(), []
    for attention in (sdpa_attention, reference_attention):
        model = make_gpt(attention=attention, inverse_layer_scale=inverse_layer_scale).eval()
        cache = KVCache(16)
        with torch.no_grad():
            outs.append(model(ids))
            outs.append(torch.cat([model(p, kv_cache=cache) for p in ids.split([9, 1, 6], 1)], 1))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


def test_hidden_then_logits_is_forward():
    model, ids = make_gpt().eval(), make_ids()
    hidden = model.hidden(ids)
    assert hidden.shape == (2, 16, 24)
    assert torch.equal(model.logits(hidden), model(ids))


def test_config_rebuilds_the_model():
    model = make_gpt(inverse_layer_scale=True, bias=False, vocab_multiple=64, attn_dropout=0.2)
    again = GPT(**model.config, attention=sdpa_attention)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(make_ids()), model.eval()(make_ids()))
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())


def test_autocast_keeps_the_residual_stream_in_float32():
    model, ids = make_gpt().eval(), make_ids()
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.hidden(ids)
        logits = model.logits(hidden)
    assert hidden.dtype == torch.float32 and logits.dtype == torch.bfloat16
    loss, _ = next_token_loss(logits, ids)
    assert loss.dtype == torch.float32


def test_context_beyond_the_positions_is_refused():
    model = make_gpt()
    with pytest.raises(ValueError, match="at most max_seqlen = 16 tokens, got 17"):
        model(make_ids(17))
    with pytest.raises(ValueError, match=r"must be \(batch, seqlen\), got \(16,\)"):
        model(make_ids()[0])


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"dim": 25}, r"dim \(25\) must be a multiple of nheads \(3\)"),
        ({"attn_dropout": 1.0}, r"attn_dropout must be a number in \[0, 1\), got 1.0"),
        ({"embd_dropout": -0.1}, r"embd_dropout must be a number in \[0, 1\), got -0.1"),
        ({"depth": 0}, "depth must be an integer of at least 1, got 0"),
        ({"vocab_multiple": 0}, "vocab_multiple must be an integer of at least 1, got 0"),
        ({"dim": 24.0}, "dim must be an integer of at least 1, got 24.0"),
        ({"resid_dropout": "0.1"}, r"resid_dropout must be a number in \[0, 1\), got '0.1'"),
        ({"vocab_size": -5}, "vocab_size must be an integer of at least 1, got -5"),
    ],
)
def test_constructor_checks(changes, message):
    with pytest.raises(ValueError, match=message):
        make_gpt(**changes)


def test_graph_is_whole():
    """One graph with dropout and without; aot_eager spares the C++ compiler."""
    ids = make_ids()
    dropping = make_gpt(depth=1)
    compiled = torch.compile(dropping, fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(ids), compiled(ids))

    model = make_gpt(depth=1, attn_dropout=0.0, embd_dropout=0.0, resid_dropout=0.0)

    def step(ids):
        loss, num_tokens = next_token_loss(model(ids), ids)
        return loss / num_tokens

    expected = step(ids)
    expected_grads = torch.autograd.grad(expected, list(model.parameters()))
    loss = torch.compile(step, fullgraph=True, backend="aot_eager")(ids)
    grads = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(grads, expected_grads)


def test_learns_a_repeating_sequence():
    model = make_gpt(embd_dropout=0.0, resid_dropout=0.0, attn_dropout=0.0)
    ids = torch.arange(17).remainder(4).expand(2, -1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss, num_tokens = next_token_loss(model(ids[:, :-1]), ids[:, 1:])
        (loss / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item() / num_tokens.item())
    assert losses[0] == pytest.approx(torch.tensor(61.0).log().item(), abs=0.1)
    assert losses[-1] < 0.1
