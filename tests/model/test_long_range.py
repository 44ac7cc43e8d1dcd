"""The classifier: padding, pooling, packed foreground, pairs, and weights for larger images."""

import pytest
import torch

from model.attention import Packing, reference_attention, sdpa_attention
from model.classifier_weights import transfer
from model.long_range import EMBEDDINGS, POOLINGS, LongRangeClassifier
from model.positions import POSITIONS, rotate
from model.transformer import Block

SIZE = 6


def make(seed=0, **options):
    torch.manual_seed(seed)
    options = {"vocab_size": 256, "num_classes": 3, "max_seqlen": 40, "depth": 2, **options}
    options = {"dim": 16, "nheads": 2, "attention": sdpa_attention, **options}
    model = LongRangeClassifier(**options)
    for name, parameter in model.named_parameters():
        if "positions" in name or "cls" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter)  # else too weak to be missed
    return model


def make_image(**options):
    options = {"image_size": SIZE, "max_seqlen": SIZE**2, "positions": "rotary_2d", **options}
    return make(**options)


def images(number=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(1, 256, (number, SIZE**2), generator=generator)
    return values * (torch.rand(values.shape, generator=generator) < 0.4)


def packed(input_ids):
    counts = (input_ids > 0).sum(1)
    cu_seqlens = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    return {
        "foreground": input_ids.flatten().nonzero()[:, 0],
        "packing": Packing(cu_seqlens, int(counts.max()) + 2),
    }


def test_nearness_lets_attention_start_near_by():
    """Queries and keys that are biases alone: the score is the documented sum of cosines."""
    torch.manual_seed(0)
    options = {"image_size": SIZE, "max_seqlen": SIZE**2, "positions": "rotary_2d", "nearness": 1.5}
    model = LongRangeClassifier(
        vocab_size=256,
        num_classes=2,
        depth=1,
        dim=16,
        nheads=2,
        attention=sdpa_attention,
        **options,
    )
    attention = model.blocks[0].attention
    q, k, v = attention.qkv(torch.zeros(1, SIZE**2, 16)).unflatten(-1, (3, 2, 8)).unbind(2)
    assert not v.any()
    rotary = model.positions.rotary(SIZE**2, None)
    scores = torch.einsum("bqhd,bkhd->bhqk", rotate(q, *rotary), rotate(k, *rotary))[0, 1] / 8**0.5
    dy, dx = 3, 2
    frequencies = model.positions.frequencies
    cosines = (dy * frequencies).cos().sum() + (dx * frequencies).cos().sum()
    torch.testing.assert_close(scores[0, dy * SIZE + dx], 1.5**2 * cosines / 8**0.5)
    assert scores[0].argmax() == 0


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("embedding", EMBEDDINGS)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_shapes_and_gradients_of_every_combination(positions, embedding, pooling):
    model = make_image(
        positions=positions,
        embedding=embedding,
        pooling=pooling,
        num_dense_classes=4,
        headdim=4,
        mlp_dim=7,
        embd_dropout=0.1,
        resid_dropout=0.1,
        attn_dropout=0.1,
    )
    out = model(images())
    assert out.logits.shape == (3, 3) and out.dense_logits.shape == (3, SIZE**2, 4)
    (out.logits.sum() + out.dense_logits.square().sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert make(**model.config).config == model.config


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("attention", [sdpa_attention, reference_attention])
def test_padding_changes_nothing(positions, pooling, attention):
    model = make(positions=positions, pooling=pooling, attention=attention).eval()
    lengths = torch.tensor([40, 11, 1])
    input_ids = torch.randint(256, (3, 40))
    out = model(input_ids, lengths).logits
    for row, length in enumerate(lengths.tolist()):
        alone = model(input_ids[row : row + 1, :length]).logits
        torch.testing.assert_close(out[row : row + 1], alone, rtol=1e-4, atol=1e-5)
    other = torch.where(torch.arange(40) < lengths[:, None], input_ids, 7)
    torch.testing.assert_close(model(other, lengths).logits, out)


def test_pooling_is_over_real_tokens():
    hidden = torch.randn(2, 5, 16)
    lengths = torch.tensor([5, 3])
    for pooling, pool in (("mean", lambda x: x.mean(0)), ("max", lambda x: x.amax(0))):
        model = make(pooling=pooling)
        expected = torch.stack([pool(hidden[0]), pool(hidden[1, :3])])
        torch.testing.assert_close(model._pool(hidden, lengths), expected)
        torch.testing.assert_close(model._pool(hidden, None)[1], pool(hidden[1]))
        rows = torch.cat([hidden[0], hidden[1, :3]])
        packing = Packing(torch.tensor([0, 5, 8], dtype=torch.int32), 5)
        torch.testing.assert_close(model._pool_packed(rows, packing), expected)
    assert torch.equal(make(pooling="cls")._pool(hidden, lengths), hidden[:, 0])


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("attention", [sdpa_attention, reference_attention])
def test_packed_foreground_equals_all_pixels_masked(positions, pooling, attention):
    model = make_image(
        positions=positions,
        pooling=pooling,
        foreground=True,
        num_dense_classes=3,
        attention=attention,
    )
    input_ids, results = images(), []
    for options in (packed(input_ids), {}):
        model.zero_grad()
        logits, dense = model(input_ids, **options)
        dense = dense if options else dense.flatten(0, 1)[input_ids.flatten() > 0]
        (logits.square().sum() + dense.square().sum()).backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        results.append({"logits": logits, "dense": dense, **grads})
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_black_pixels_count_without_foreground():
    model, input_ids = make_image(), images()
    dense = model(input_ids).logits
    masked = make_image(foreground=True)(input_ids).logits
    assert (dense - masked).abs().max() > 1e-3


@pytest.mark.parametrize("pooling", POOLINGS)
def test_two_towers_share_weights_and_meet_in_the_head(pooling):
    model = make(num_towers=2, pooling=pooling).eval()
    pairs = torch.randint(256, (4, 2, 40))
    lengths = torch.tensor([[40, 3], [5, 40], [1, 1], [9, 9]])
    logits, dense = model(pairs, lengths)
    assert logits.shape == (4, 3) and dense is None
    one, two = (
        model._pool(model._hidden(pairs[:, i], None, lengths[:, i]), lengths[:, i]) for i in (0, 1)
    )
    features = torch.cat([one, two, one * two, one - two], -1)
    torch.testing.assert_close(model.head(features), logits)
    assert model.head[0].in_features == 4 * 16 and model.head[2].out_features == 32
    swapped = model(pairs.flip(1), lengths.flip(1)).logits
    assert swapped.shape == logits.shape and not torch.allclose(swapped, logits)
    same = model(pairs[:, :1].expand(-1, 2, -1)).logits
    torch.testing.assert_close(same, model(pairs[:, :1].expand(-1, 2, -1).flip(1)).logits)


def test_blocks_are_those_of_the_other_models():
    model = make(headdim=4, mlp_dim=5)
    assert all(type(block) is Block and not block.attention.causal for block in model.blocks)
    assert model.blocks[0].attention.qkv.out_features == 3 * 2 * 4
    assert model.blocks[0].mlp.up.out_features == model.head[0].out_features == 5


@pytest.mark.parametrize("positions", POSITIONS)
def test_weights_of_a_small_image_start_a_larger_one(positions):
    small = make_image(positions=positions, num_dense_classes=3)
    large = make_image(seed=1, positions=positions, image_size=12, max_seqlen=144)
    kept = transfer(large, small.config, small.state_dict())
    assert kept == []
    block = torch.tensor([(y // 2) * SIZE + x // 2 for y in range(12) for x in range(12)])
    if positions != "rotary_2d" and positions != "sinusoidal":
        added = small.positions.add(torch.zeros(1, 36, 16), None)[:, block]
        torch.testing.assert_close(large.positions.add(torch.zeros(1, 144, 16), None), added)
    back = make_image(seed=2, positions=positions, num_dense_classes=5)
    fresh = transfer(back, small.config, small.state_dict())
    assert fresh == ["dense_head.weight", "dense_head.bias"]


def test_weights_of_another_model_are_refused():
    small = make_image(positions="learned")
    for options, message in (
        ({"image_size": 9, "max_seqlen": 81}, "from 6 to 9 pixels"),
        ({"dim": 32}, "does not fit"),
        ({"positions": "learned_2d"}, "positions is 'learned' in the checkpoint"),
        ({"nheads": 4}, "nheads is 2 in the checkpoint and 4"),
        ({"depth": 3}, "blocks.2.attention.out.bias does not fit"),
    ):
        model = make_image(**{"positions": "learned", **options})
        with pytest.raises(ValueError, match=message):
            transfer(model, small.config, small.state_dict())


def test_flops_are_told_where_all_pixels_count():
    model = make_image()
    weights = 2 * (4 * 16 * 16 + 2 * 16 * 64)
    assert model.flops_per_token(36) == {"full": 6 * weights + 12 * 2 * 16 * 36}
    assert make().flops_per_token(40) == make_image(foreground=True).flops_per_token(36) == {}
    assert model.num_params() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"depth": 0}, "depth must be an integer of at least 1, got 0"),
        ({"resid_dropout": 1.0}, "resid_dropout must be a number in"),
        ({"embedding": "patch"}, "embedding must be one of token, pixel"),
        ({"pooling": "last"}, "pooling must be one of mean, max, cls"),
        ({"num_towers": 3}, "num_towers must be 1 or 2"),
        ({"nearness": 1.5}, "nearness must be at least 0, and 0 without rotary positions"),
        ({"image_size": 5}, "max_seqlen must be image_size .. 2 = 25, got 40"),
        ({"foreground": True}, "foreground needs an image_size"),
        ({"num_towers": 2, "num_dense_classes": 2}, "dense head needs one tower"),
        ({"nheads": 3}, "dim .16. must be a multiple of nheads .3."),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"input_ids must be \(batch, 2, seqlen\)"):
        make(num_towers=2)(torch.zeros(2, 40, dtype=torch.int64))
    with pytest.raises(ValueError, match="at most 40 tokens, got 41"):
        make()(torch.zeros(2, 41, dtype=torch.int64))
    with pytest.raises(ValueError, match="reads 36 tokens, got 35"):
        make_image()(torch.zeros(2, 35, dtype=torch.int64))
    with pytest.raises(ValueError, match="needs a model with foreground=true"):
        make_image()(images(), **packed(images()))


def test_our_kernels_serve_packed_and_masked_foreground():
    """The packed kernel, and key padding, as on a GPU; in Triton's interpreter without one."""
    flash_attention = pytest.importorskip("flash_kernels").flash_attention
    device = "cuda" if torch.cuda.is_available() else "cpu"
    input_ids = images(2).to(device)
    options = {"foreground": True, "depth": 1}
    ours, plain = (
        make_image(attention=attention, **options).to(device)
        for attention in (flash_attention, sdpa_attention)
    )
    expected = plain(input_ids).logits
    for extra in (packed(input_ids), {}):
        out = ours(input_ids, **extra).logits
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
        ours.zero_grad()
        out.sum().backward()
        assert ours.blocks[0].attention.qkv.weight.grad.isfinite().all()
