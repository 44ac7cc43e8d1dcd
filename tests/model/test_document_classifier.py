"""model/document_classifier.py: the head against its formula, documents packed and alone."""

import pytest
import torch
from torch.nn import functional as F

from model.attention import Packing
from model.document_classifier import DocumentClassifier, LabelAttention
from tests.training import randomize

SIZES = {"vocab_size": 50, "max_seqlen": 12, "depth": 2, "dim": 16, "nheads": 2}
LENGTHS = (5, 12, 2)


def make(**changes):
    torch.manual_seed(0)
    options = {"num_classes": 3, "multi_label": True, "num_segments": 1, "position_offset": 2}
    return randomize(DocumentClassifier(**{**SIZES, **options, **changes}))


def packed(lengths=LENGTHS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (sum(lengths),), generator=generator)
    return ids, packing(lengths)


def packing(lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    return Packing(ends, max(lengths))


def test_head_is_label_wise_attention():
    """Mullenbach et al., equations 4 to 7 without the convolution: for each label a softmax over
    tokens, the weighted sum of their states, and its product with the label's weights."""
    torch.manual_seed(1)
    head = LabelAttention(8, 4)
    torch.nn.init.normal_(head.bias)
    hidden = torch.randn(sum(LENGTHS), 8)
    logits = head(hidden, packing(LENGTHS))
    assert logits.shape == (3, 4) and logits.dtype == torch.float32
    for row, states in enumerate(hidden.split(LENGTHS)):
        for label in range(4):
            weights = (states @ head.queries.weight[label]).softmax(0)
            document = (weights[:, None] * states).sum(0)
            expected = head.outputs.weight[label] @ document + head.bias[label]
            torch.testing.assert_close(logits[row, label], expected)


def test_gradient_of_the_head():
    torch.manual_seed(1)
    head = LabelAttention(4, 2).double()
    hidden = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    states = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    (head(hidden, packing((3, 4))) * 0.5).sum().backward()
    states.data.copy_(hidden.data)
    plain = [
        ((s @ head.queries.weight.T).softmax(0).T @ s * head.outputs.weight).sum()
        for s in states.split((3, 4))
    ]
    (0.5 * sum(plain)).backward()
    torch.testing.assert_close(hidden.grad, states.grad, rtol=1e-5, atol=1e-6)


def test_documents_do_not_see_each_other_nor_padding():
    model = make()
    ids, together = packed()
    logits = model(ids, together)
    for row, document in enumerate(ids.split(LENGTHS)):
        alone = model(document, packing((len(document),)))
        torch.testing.assert_close(logits[row], alone[0], rtol=1e-5, atol=1e-5)
        wider = model(document, Packing(packing((len(document),)).cu_seqlens, 12))
        torch.testing.assert_close(wider[0], alone[0], rtol=1e-5, atol=1e-5)


def test_logits_are_the_head_on_the_encoders_states():
    model = make()
    ids, _ = packed((12,))
    hidden = model.encoder.hidden(ids[None])[0]
    expected = F.linear(hidden, model.head.queries.weight).softmax(0).T @ hidden
    expected = (expected * model.head.outputs.weight).sum(-1) + model.head.bias
    torch.testing.assert_close(model(ids, packing((12,)))[0], expected, rtol=1e-5, atol=1e-5)


def test_config_rebuilds_the_shape_and_names_its_kind():
    model = make()
    again = DocumentClassifier(**model.config)
    again.load_state_dict(model.state_dict())
    ids, together = packed()
    assert torch.equal(again.eval()(ids, together), model(ids, together))
    assert model.encoder.pooler is model.encoder.mlm is model.encoder.nsp is None
    assert model.blocks is model.encoder.blocks
    assert model.num_params() == model.encoder.num_params() + 2 * 3 * 16 + 3


def test_flops_are_the_encoders():
    """6 a weight of the blocks and token, 12 dim a layer and pair."""
    model = make()
    weights = sum(p.numel() for p in model.blocks.parameters())
    assert model.flops(tokens=19, pairs=173, samples=3) == 6 * weights * 19 + 12 * 2 * 16 * 173


def test_refusals():
    with pytest.raises(ValueError, match="num_classes must be at least 1, got 0"):
        make(num_classes=0)
    with pytest.raises(ValueError, match="at most max_seqlen = 12 tokens, got 13"):
        make()(*packed((13,)))
