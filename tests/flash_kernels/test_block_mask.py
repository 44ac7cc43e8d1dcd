"""BlockMask against dense matrices: lists, restriction, conversions, and files."""

import time
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_kernels import block_patterns, reference
from flash_kernels.block_mask import BlockMask

BLOCK_SIZES = st.sampled_from([16, 32, 48])


@st.composite
def masks(draw) -> tuple[BlockMask, torch.Tensor]:
    """A mask and its tokens, bool (mask_batch, mask_heads, seqlen_q, seqlen_k)."""
    block_m, block_n = draw(BLOCK_SIZES), draw(BLOCK_SIZES)
    seqlen_q, seqlen_k = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    shape = (draw(st.integers(1, 2)), draw(st.integers(1, 2)))
    shape += (-(-seqlen_q // block_m), -(-seqlen_k // block_n))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    blocks = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    token_mask = None
    if draw(st.booleans()):
        # Whole blocks of ones, or nearly, beside scattered tokens.
        token_mask = torch.rand(shape[0], 1, seqlen_q, seqlen_k, generator=generator) < 0.7
        token_mask[..., : draw(st.integers(0, seqlen_k))] = draw(st.booleans())
    mask = BlockMask.from_dense(
        blocks, block_m, block_n, seqlen_q=seqlen_q, seqlen_k=seqlen_k, token_mask=token_mask
    )
    tokens = blocks.repeat_interleave(block_m, 2).repeat_interleave(block_n, 3)
    tokens = tokens[:, :, :seqlen_q, :seqlen_k]
    return mask, tokens if token_mask is None else tokens & token_mask


def blocks_of(tokens: torch.Tensor, block_m: int, block_n: int):
    """(block row, block column, its tokens) of one head."""
    for row, strip in enumerate(tokens.split(block_m, 0)):
        for col, block in enumerate(strip.split(block_n, 1)):
            yield row, col, block


def listed(lists) -> dict[tuple[int, int, int, int], tuple[bool, int]]:
    """{(batch, head, line, index): (is partial, pattern)}, with the order checked."""
    found, position = {}, 0
    for b, heads in enumerate(lists.bounds.tolist()):
        for h, lines in enumerate(heads):
            for line, (begin, full_begin, end) in enumerate(lines):
                assert position == begin <= full_begin <= end
                position = end
                for part in (range(begin, full_begin), range(full_begin, end)):
                    indices = lists.indices[part.start : part.stop].tolist()
                    assert indices == sorted(set(indices))
                    for i, index in zip(part, indices, strict=True):
                        found[b, h, line, index] = (i < full_begin, int(lists.patterns[i]))
    assert position == lists.indices.shape[0] == lists.patterns.shape[0] == len(found)
    assert {t.dtype for t in lists} == {torch.int32}
    return found


def assert_lists_match_tokens(mask: BlockMask, tokens: torch.Tensor) -> None:
    """Of a mask without options: full blocks are all visible, missing ones all hidden."""
    rows = listed(mask.rows)
    transposed = {(b, h, row, col): e for (b, h, col, row), e in listed(mask.cols).items()}
    assert rows == transposed
    for b in range(tokens.shape[0]):
        for h in range(tokens.shape[1]):
            for row, col, block in blocks_of(tokens[b, h], mask.block_m, mask.block_n):
                is_partial, pattern = rows.get((b, h, row, col), (None, None))
                assert (is_partial is None) == (not block.any())
                if is_partial is not None:
                    assert is_partial == (not block.all()) == (pattern >= 0)
                if is_partial:
                    stored = mask.token_masks[pattern]
                    assert torch.equal(stored[: block.shape[0], : block.shape[1]], block)
                    assert stored.sum() == block.sum()  # nothing past the end of the sequence
    assert torch.equal(mask.to_token_mask(), tokens)
    assert len(mask.token_masks.unique(dim=0)) == len(mask.token_masks)
    assert mask.density == mask.to_dense().double().mean()


@settings(max_examples=60, deadline=None)
@given(masks())
def test_lists_and_transpose_match_the_dense_matrix(case):
    assert_lists_match_tokens(*case)


@settings(max_examples=25, deadline=None)
@given(masks())
def test_from_function_matches_the_token_matrix(case):
    dense, tokens = case
    batch, nheads, seqlen_q, seqlen_k = tokens.shape
    mask = BlockMask.from_function(
        lambda b, h, q_idx, k_idx: tokens[b, h, q_idx, k_idx],
        seqlen_q,
        seqlen_k,
        block_m=dense.block_m,
        block_n=dense.block_n,
        batch=batch,
        nheads=nheads,
    )
    assert_lists_match_tokens(mask, tokens)
    assert repr(mask) == repr(dense)
    assert torch.equal(mask.token_masks, dense.token_masks)


def test_from_function_joins_its_chunks(monkeypatch):
    expected = BlockMask.from_function(lambda b, h, q, k: q % 40 >= k % 50, 300, 300, block_m=16)
    monkeypatch.setattr("flash_kernels.block_lists._CHUNK_TOKENS", 3 * 16 * 128)
    mask = BlockMask.from_function(lambda b, h, q, k: q % 40 >= k % 50, 300, 300, block_m=16)
    assert torch.equal(mask.token_masks, expected.token_masks)
    assert listed(mask.rows) == listed(expected.rows)


def test_from_function_takes_constant_results():
    for value in (False, True):
        mask = BlockMask.from_function(lambda b, h, q, k, v=value: torch.tensor(v), 100, 70)
        assert mask.to_token_mask().all() == value and mask.num_blocks == value
        assert mask.token_masks.shape == (0, 128, 128)


options = st.fixed_dictionaries(
    {
        "causal": st.booleans(),
        "window": st.tuples(*2 * [st.none() | st.integers(0, 150)]),
        "per_row_tails": st.booleans(),
        "mask_all": st.booleans(),
    }
)


@settings(max_examples=120, deadline=None)
@given(masks(), options, st.data())
def test_restricted_hides_only_hidden_blocks_and_trusts_only_full_ones(case, options, data):
    mask, tokens = case
    covered_q, covered_k = mask.num_rows * mask.block_m, mask.num_cols * mask.block_n
    seqlen_q = data.draw(st.integers(0, covered_q))
    seqlen_k = data.draw(st.integers(0, covered_k))
    restricted = mask.restricted(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **options)
    shape = (-(-seqlen_q // mask.block_m), -(-seqlen_k // mask.block_n))
    assert (restricted.seqlen_q, restricted.seqlen_k) == (seqlen_q, seqlen_k)
    assert (restricted.num_rows, restricted.num_cols) == shape
    assert restricted.token_masks is mask.token_masks
    if seqlen_q == 0 or seqlen_k == 0:
        assert restricted.num_blocks == 0
        return

    # Tokens past the end of the mask belong to their block.
    tokens = mask.pattern_masks()[mask.to_patterns()].transpose(3, 4).flatten(4).flatten(2, 3)
    tokens = tokens[:, :, :seqlen_q, :seqlen_k]
    seen = reference.visible_keys(
        seqlen_q, seqlen_k, causal=options["causal"], window=options["window"]
    )
    rows, original = listed(restricted.rows), listed(mask.rows)
    assert rows == {(b, h, row, col): e for (b, h, col, row), e in listed(restricted.cols).items()}
    for b in range(mask.mask_batch):
        for h in range(mask.mask_heads):
            for row, col, block in blocks_of(seen, mask.block_m, mask.block_n):
                key = (b, h, row, col)
                assert (key in rows) == (key in original and bool(block.any()))
                if key not in rows:
                    continue
                is_partial, pattern = rows[key]
                assert pattern == original[key][1]
                is_cut = not block.all() or block.shape[1] < mask.block_n
                is_cut |= options["per_row_tails"] and block.shape[0] < mask.block_m
                assert is_partial == (is_cut or pattern >= 0 or options["mask_all"])
    assert torch.equal(restricted.to_token_mask() & seen, tokens & seen)


def test_restricted_is_kept_but_not_without_bound():
    mask = BlockMask.from_dense(torch.ones(4, 4, dtype=torch.bool))
    first = mask.restricted(causal=True, seqlen_q=300)
    assert mask.restricted(window=(None, 0), seqlen_q=300) is first
    assert mask.restricted(causal=True) is not first
    for seqlen in range(100):
        mask.restricted(seqlen_q=seqlen)
    assert len(mask._kept) < 64


def test_restricted_refuses_lengths_that_the_mask_does_not_cover():
    mask = BlockMask.from_dense(torch.ones(2, 2, dtype=torch.bool), seqlen_q=200, seqlen_k=200)
    assert mask.restricted(seqlen_q=256).seqlen_q == 256
    with pytest.raises(ValueError, match="seqlen_q must be at most 256.*got 257.*longest"):
        mask.restricted(seqlen_q=257)
    with pytest.raises(ValueError, match="seqlen_k must be at most 256.*got 300.*longest"):
        mask.restricted(seqlen_k=300)
    with pytest.raises(ValueError, match=r"window must hold.*got \(-1, 0\)"):
        mask.restricted(window=(-1, 0))


def test_paper_mask():
    blocks = torch.rand(32, 2) < 0.5
    for given_blocks in (blocks, blocks.int()):
        mask = BlockMask.from_paper(given_blocks)
        assert (mask.block_m, mask.block_n) == (16, 256)
        assert (mask.seqlen_q, mask.seqlen_k) == (512, 512)
        assert torch.equal(mask.to_dense()[0, 0], blocks)
    with pytest.raises(ValueError, match="0 and 1.*int64.*blocks != 0"):
        BlockMask.from_paper(2 * torch.ones(32, 2, dtype=torch.int64))


def _flex_mod(b, h, q_idx, k_idx):
    return (q_idx >= k_idx) & (q_idx - k_idx < 70 + 50 * b) | (k_idx < 5 + h)


@pytest.mark.parametrize("separate_full_blocks", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 300, 300), (2, 3, 129, 384), (None, 2, 64, 33)])
def test_flex_round_trip(shape, separate_full_blocks):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    tokens = flex.create_mask(_flex_mod, *shape, device="cpu")
    theirs = flex.create_block_mask(
        _flex_mod, *shape, device="cpu", BLOCK_SIZE=(64, 32),
        separate_full_blocks=separate_full_blocks,
    )  # fmt: skip
    ours = BlockMask.from_flex(theirs)
    assert_lists_match_tokens(ours, tokens)

    back = ours.to_flex()
    assert back.shape == theirs.shape and back.BLOCK_SIZE == theirs.BLOCK_SIZE
    assert torch.equal(back.to_dense(), theirs.to_dense())
    assert torch.equal(flex.create_mask(back.mask_mod, *shape, device="cpu"), tokens)
    assert_lists_match_tokens(BlockMask.from_flex(back), tokens)
    if separate_full_blocks:
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_q_num_blocks"):
            assert torch.equal(getattr(back, name), getattr(theirs, name)), name


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_agrees_through_to_flex():
    """FlexAttention on the converted mask and our reference, the mask shared by both batches."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    blocks = torch.rand(1, 2, 2, 3, generator=torch.Generator().manual_seed(1)) < 0.6
    blocks[..., 0] = True
    token_mask = torch.rand(1, 1, 100, 180) < 0.8
    mask = BlockMask.from_dense(blocks, 64, 64, seqlen_q=100, seqlen_k=180, token_mask=token_mask)
    q, k, v = (torch.randn(2, n, 2, 16, dtype=torch.float64) for n in (100, 180, 180))
    expected = reference.block_sparse_attention(q, k, v, mask)
    out = flex.flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=mask.to_flex())
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_flex_mask_given_as_blocks_only():
    """from_kv_blocks without a mask_mod or full blocks: all listed blocks are visible."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    mask = BlockMask.from_flex(flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128))
    assert mask.to_dense()[0, 0].tolist() == [[False, True], [True, True]]
    assert mask.token_masks.shape[0] == 0
    with pytest.raises(ValueError, match="block_m must be a multiple of 16.*512"):
        BlockMask.from_flex(flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=512))


def test_save_and_load(tmp_path):
    mask = block_patterns.local_global(500, window=70, num_global=3, block_m=64, block_n=32)
    mask = mask.restricted(causal=True)  # has partial blocks without a token mask
    path = tmp_path / "mask.pt"
    mask.save(path)
    mask.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["mask.pt"]
    loaded = BlockMask.load(path)
    assert repr(loaded) == repr(mask)
    assert torch.equal(loaded.token_masks, mask.token_masks)
    for ours, theirs in zip((*mask.rows, *mask.cols), (*loaded.rows, *loaded.cols), strict=True):
        assert torch.equal(ours, theirs)
    torch.save({"weights": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="must hold a mask that BlockMask.save wrote"):
        BlockMask.load(path)


def test_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    mask = block_patterns.butterfly(512)
    path = tmp_path / "mask.pt"
    mask.save(path)
    monkeypatch.setattr(torch, "save", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mask.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["mask.pt"]
    assert BlockMask.load(path).num_blocks == mask.num_blocks


def test_to_moves_every_tensor():
    mask = block_patterns.causal(200)
    assert mask.to("cpu") is mask
    moved = mask.to("meta")
    tensors = (*moved.rows, *moved.cols, moved.token_masks)
    assert {t.device.type for t in tensors} == {"meta"} and moved.device.type == "meta"


def test_pictures(tmp_path):
    mask = BlockMask.from_dense(torch.tensor([[1, 0, 0], [1, 1, 0]]).bool(), seqlen_k=300)
    assert str(mask).splitlines()[1:] == ["██····", "████··"]
    assert repr(mask) == str(mask).splitlines()[0] and "density=0.5," in repr(mask)
    path = tmp_path / "mask.svg"
    svg = mask.plot(path)
    assert path.read_text(encoding="utf-8") == svg == mask._repr_svg_()
    paths = [e.get("d") for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("path")]
    assert paths == ["", "M0 0h1v1h-1zM0 1h2v1h-2z"]  # partial, full
    many = BlockMask.from_dense(torch.ones(4, 5, 80, 80, dtype=torch.bool), 16, 16)
    assert many.plot().count("<path") == 2 * 12 and "first 12 of 20" in many.plot()
    assert len(str(many).splitlines()) == 1 + 32


def _dense(*shape):
    return torch.ones(shape, dtype=torch.bool)


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: BlockMask.from_dense(_dense(2, 2), 24), "block_m must be a multiple of 16.*24"),
        (lambda: BlockMask.from_dense(_dense(2, 2), 16, 512), "block_n must be.*256, got 512"),
        (lambda: BlockMask.from_dense(_dense(2, 2), 0), "block_m must be.*got 0"),
        (lambda: BlockMask.from_dense(_dense(2, 2).int()), "blocks must be bool.*int32.*!= 0"),
        (lambda: BlockMask.from_dense(_dense(2, 2, 2)), r"blocks must be \(rows.*\(2, 2, 2\)"),
        (lambda: BlockMask.from_dense(_dense(0, 2)), r"not empty.*\(0, 2\)"),
        (
            lambda: BlockMask.from_dense(_dense(2, 2), seqlen_q=100),
            "seqlen_q must be from 129 to 256 for 2 block rows.*got 100",
        ),
        (
            lambda: BlockMask.from_dense(_dense(2, 2), seqlen_k=257),
            "seqlen_k must be.*2 block columns.*got 257",
        ),
        (
            lambda: BlockMask.from_dense(_dense(2, 2), token_mask=_dense(256, 255)),
            r"token_mask must end in.*\(256, 256\).*255",
        ),
        (
            lambda: BlockMask.from_dense(
                _dense(2, 2, 2, 2), token_mask=torch.ones(3, 1, 256, 256).bool()
            ),
            "same batch or 1, got 2 and 3",
        ),
        (
            lambda: BlockMask.from_dense(_dense(1, 1), token_mask=_dense(128, 128).to("meta")),
            "token_mask must be on cpu.*meta",
        ),
        (lambda: BlockMask.from_function(_flex_mod, 0, 5), "seqlen_q must be at least 1, got 0"),
        (lambda: BlockMask.from_function(_flex_mod, 5, 5, batch=0), "batch must be.*got 0"),
        (
            lambda: BlockMask.from_function(lambda b, h, q, k: q - k, 5, 5),
            "must return a bool tensor, got torch.int64",
        ),
        (
            lambda: BlockMask.from_function(lambda b, h, q, k: (q >= k)[..., None], 5, 5),
            r"element by element.*\(1, 128, 128\).*table\[q_idx, k_idx\]",
        ),
    ],
)
def test_errors(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_butterfly_of_64k_tokens_is_small_and_quick():
    start = time.perf_counter()
    mask = block_patterns.butterfly(65536)
    restricted = mask.restricted(causal=True)
    seconds = time.perf_counter() - start
    assert mask.num_blocks == 512 * 10 and mask.density == 10 / 512
    assert restricted.num_blocks == 512 + 512 * 9 // 2
    tensors = (*mask.rows, *mask.cols, mask.token_masks)
    assert sum(t.numel() * t.element_size() for t in tensors) < 2**17
    assert seconds < 2
