import pytest
import torch
from torch import nn

from model.gpt import GPT
from model.optim import param_groups, warmup_cosine, warmup_linear, warmup_rsqrt, warmup_sqrt


def test_only_matrices_decay():
    model = GPT(vocab_size=61, max_seqlen=8, depth=2, dim=12, nheads=3)
    decayed, undecayed = param_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert decayed["weight_decay"] == 0.1 and undecayed["weight_decay"] == 0.0
    assert [names[id(p)] for p in decayed["params"]] == [
        f"blocks.{i}.{part}.weight"
        for i in range(2)
        for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    ]
    rest = [names[id(p)] for p in undecayed["params"]]
    assert rest == [name for name in names.values() if name in rest]
    assert len(rest) + len(decayed["params"]) == len(names)


def test_tied_weight_counts_once_as_an_embedding():
    model = nn.ModuleDict({"a_head": nn.Linear(4, 9, bias=False), "tokens": nn.Embedding(9, 4)})
    model["a_head"].weight = model["tokens"].weight
    (group,) = param_groups(model, 0.1)
    assert group["weight_decay"] == 0.0 and len(group["params"]) == 1
    (group,) = param_groups(model, 0.1, decay_embeddings=True)
    assert group["weight_decay"] == 0.1 and len(group["params"]) == 1


def test_frozen_parameters_are_left_out():
    model = nn.Linear(2, 3)
    model.weight.requires_grad_(False)
    (group,) = param_groups(model, 0.1)
    assert group["params"][0] is model.bias
    model.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="requires_grad=True"):
        param_groups(model, 0.1)
    with pytest.raises(ValueError, match="weight_decay must be at least 0, got -1"):
        param_groups(model, -1)


def test_groups_serve_an_optimizer():
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.fill_(1.0), model.bias.fill_(1.0)
    optimizer = torch.optim.AdamW(param_groups(model, 0.5), lr=0.1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert model.weight[0, 0].item() == pytest.approx(1 - 0.1 * 0.5)
    assert model.bias[0].item() == 1.0


@pytest.mark.parametrize(
    "step,expected",
    [(0, 0.0), (1, 0.25), (3, 0.75), (4, 1.0), (5, 0.9), (9, 0.5), (14, 0.0), (99, 0.0)],
)
def test_warmup_linear(step, expected):
    assert warmup_linear(step, 4, 14) == pytest.approx(expected)


def test_warmup_linear_is_transformers_schedule():
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = transformers.get_linear_schedule_with_warmup(optimizer, 40, 400).lr_lambdas[0]
    assert [warmup_linear(s, 40, 400) for s in range(450)] == pytest.approx(
        [theirs(s) for s in range(450)]
    )


@pytest.mark.parametrize(
    "schedule,step,expected",
    [
        (warmup_linear, 9, 0.55),
        (warmup_linear, 14, 0.1),
        (warmup_cosine, 2, 0.5),
        (warmup_cosine, 4, 1.0),
        (warmup_cosine, 9, 0.55),
        (warmup_cosine, 14, 0.1),
        (warmup_cosine, 50, 0.1),
    ],
)
def test_decay_to_a_floor(schedule, step, expected):
    assert schedule(step, 4, 14, final_fraction=0.1) == pytest.approx(expected)


def test_warmup_sqrt_is_transformers_schedule():
    transformers = pytest.importorskip("transformers")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = transformers.get_polynomial_decay_schedule_with_warmup(
        optimizer, 40, 400, lr_end=0.1, power=0.5
    ).lr_lambdas[0]
    ours = [warmup_sqrt(step, 40, 400, final_fraction=0.1) for step in range(450)]
    assert ours == pytest.approx([theirs(step) for step in range(450)])


def test_schedule_without_warmup_or_decay():
    assert warmup_linear(0, 0, 10) == 1.0
    assert warmup_linear(5, 5, 5) == 1.0
    with pytest.raises(ValueError, match=r"warmup_steps must be in \[0, total_steps = 4\], got 5"):
        warmup_linear(0, 5, 4)


def test_rsqrt_is_the_arenas_schedule():
    base = 0.05  # times min(1, step / warmup) / sqrt(max(step, warmup))
    for step in (0, 3, 10, 11, 40, 99):
        expected = base * min(1.0, step / 10) / max(step, 10) ** 0.5
        assert base / 10**0.5 * warmup_rsqrt(step, 10, 100) == pytest.approx(expected)
    assert warmup_rsqrt(90, 10, 100, final_fraction=0.5) == 0.5
    assert warmup_rsqrt(4, 0, 100) == 0.5
