import copy

import pytest
import torch
from torch import nn

from model.bert import BERT
from model.lamb import LAMB
from model.optim import lamb


class LiteralLAMB:
    """Algorithm 2 of the paper, one tensor at a time, in float64."""

    def __init__(self, params, lr, beta1, beta2, eps, weight_decay):
        self.params = [p.detach().double().clone() for p in params]
        self.m = [torch.zeros_like(p) for p in self.params]
        self.v = [torch.zeros_like(p) for p in self.params]
        self.t = [0 for _ in self.params]
        self.options = lr, beta1, beta2, eps, weight_decay

    def step(self, grads, adapt=True):
        lr, beta1, beta2, eps, weight_decay = self.options
        for i, (x, g) in enumerate(zip(self.params, grads, strict=True)):
            if g is None:
                continue
            g = g.double()
            self.t[i] += 1
            self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * g**2
            m_hat = self.m[i] / (1 - beta1 ** self.t[i])
            v_hat = self.v[i] / (1 - beta2 ** self.t[i])
            update = m_hat / (v_hat.sqrt() + eps) + weight_decay * x
            ratio = 1.0
            if adapt and x.norm() > 0 and update.norm() > 0:
                ratio = x.norm() / update.norm()
            self.params[i] = x - lr * ratio * update


def make_params(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (2, 2, 2), ()]
    params = [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]
    params.append(nn.Parameter(torch.zeros(4, dtype=dtype)))  # ratio 1 at its first step
    return params


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("adapt", [True, False])
def test_equals_the_algorithm_tensor_by_tensor(dtype, tolerance, weight_decay, adapt):
    params = make_params(dtype)
    literal = LiteralLAMB(params, 0.02, 0.8, 0.95, 1e-4, weight_decay)
    optimizer = LAMB(
        params,
        0.02,
        betas=(0.8, 0.95),
        eps=1e-4,
        weight_decay=weight_decay,
        adapt_undecayed=adapt,
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        for i, param in enumerate(params):
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            if i == 1 and step % 2:
                param.grad = None  # its step count falls behind
            if i == 2 and step < 2:
                param.grad = torch.zeros_like(param)  # no update norm where nothing decays
        optimizer.step()
        literal.step([p.grad for p in params], adapt or weight_decay > 0)
        for got, expected in zip(params, literal.params, strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_step_size_is_the_tensors_own_norm_times_lr():
    params = make_params()[:3]
    before = [p.detach().clone() for p in params]
    for factor, param in zip((1e-6, 1.0, 1e6), params, strict=True):
        param.grad = factor * torch.randn_like(param)
    LAMB(params, 0.01, weight_decay=0.0, eps=0.0).step()
    for a, b in zip(before, params, strict=True):
        assert ((b - a).norm() / a.norm()).item() == pytest.approx(0.01, rel=1e-4)


def test_groups_of_bert():
    model = BERT(vocab_size=61, max_seqlen=8, depth=1, dim=12, nheads=3)
    optimizer = lamb(model, lr=0.1)
    decayed, undecayed = optimizer.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    rest = {names[id(p)] for p in undecayed["params"]}
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.01, 0.0)
    assert all(name.endswith("bias") or "norm" in name for name in rest)
    assert "embeddings.tokens.weight" in {names[id(p)] for p in decayed["params"]}
    assert not decayed["adapt_undecayed"]


def test_saved_state_continues_bit_equal(tmp_path):
    params = make_params()
    optimizer = LAMB(params, 0.01)
    generator = torch.Generator().manual_seed(2)

    def steps(params, optimizer, grads):
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad.clone()
            optimizer.step()

    grads = [[torch.randn(p.shape, generator=generator) for p in params] for _ in range(4)]
    steps(params, optimizer, grads[:2])
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    again = copy.deepcopy(params)
    resumed = LAMB(again, 0.01)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    steps(params, optimizer, grads[2:])
    steps(again, resumed, grads[2:])
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))


def test_closure_and_refusals():
    param = nn.Parameter(torch.ones(3))
    optimizer = LAMB([param], 0.1)

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0 and optimizer.step(closure).item() < 3.0
    for options, words in [
        ({"lr": -1.0}, "lr must be at least 0, got -1"),
        ({"lr": 1.0, "eps": -1.0}, "eps must be at least 0"),
        ({"lr": 1.0, "weight_decay": -1.0}, "weight_decay must be at least 0"),
        ({"lr": 1.0, "betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
    ]:
        with pytest.raises(ValueError, match=words):
            LAMB([param], **options)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match="dense gradients"):
        LAMB(table.parameters(), 0.1).step()


def test_sharded_parameters_step_as_whole_ones():
    """FSDP2 in one process: the parameters are DTensors."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    sharded = copy.deepcopy(whole)
    x = torch.randn(5, 4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        fully_shard(sharded, mesh=mesh)
        for model in (whole, sharded):
            optimizer = LAMB(model.parameters(), 0.1)
            for _ in range(3):
                model(x).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        for a, b in zip(whole.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(a, b.full_tensor())
    finally:
        dist.destroy_process_group()
