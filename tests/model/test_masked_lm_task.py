"""BERT's optimizer step: invariant to the split and form of its batch, stopped at a target."""

import functools

import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

from model.attention import pack, sdpa_attention
from model.bert import BERT
from model.bert_files import export_bert
from model.callbacks import Metrics, StopAtTarget
from model.checkpoint import newest_intact
from model.language_task import MaskedLMTask
from model.loggers import CsvLogger
from model.optim import lamb
from model.saving import Checkpoints
from tests.training import make_trainer, weights

VOCAB, SEQLEN, PER_STEP = 37, 12, 4
LENGTHS = torch.tensor([12, 3, 7, 5])


def batch(step, packed=True, filled=0):
    """Four sequences of unequal lengths and masks; the last `filled` ones fill up a batch."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCAB, (PER_STEP, SEQLEN), generator=generator)
    is_real = torch.arange(SEQLEN) < LENGTHS[:, None]
    is_masked = (torch.rand(PER_STEP, SEQLEN, generator=generator) < 0.4) & is_real
    is_masked[:, 1] = True
    is_masked[PER_STEP - filled :] = False
    rows = {
        "input_ids": torch.where(is_masked, 2, ids).masked_fill(~is_real, 0),
        "labels": torch.where(is_masked, ids, -100),
        "segment_ids": torch.randint(0, 2, (PER_STEP, SEQLEN), generator=generator),
    }
    nsp_labels = torch.randint(0, 2, (PER_STEP,), generator=generator)
    nsp_labels[PER_STEP - filled :] = -100
    if not packed:
        return {**rows, "lengths": LENGTHS.int(), "nsp_labels": nsp_labels}
    layout = {"cu_seqlens": pack(rows["labels"], LENGTHS)[1], "max_seqlen": SEQLEN}
    return {**{k: pack(v, LENGTHS)[0] for k, v in rows.items()}, **layout, "nsp_labels": nsp_labels}


class Sentences(LightningDataModule):
    def __init__(self, packed=True):
        super().__init__()
        self.packed = packed

    def train_dataloader(self):
        first = self.trainer.global_step
        return DataLoader([batch(s, self.packed) for s in range(first, 20)], batch_size=None)

    def val_dataloader(self):
        batches = [batch(1000, self.packed), batch(1001, self.packed, filled=2)]
        return DataLoader(batches, batch_size=None)


def make_model(dropout=0.0, **changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "max_seqlen": SEQLEN, "depth": 2, "dim": 16, "nheads": 2}
    dropouts = {"resid_dropout": dropout, "attn_dropout": dropout}
    return BERT(**{**sizes, **dropouts, "attention": sdpa_attention, **changes})


def make_task(
    dropout=0.0, micro_sequences=PER_STEP, optimizer=lamb, lr=1e-2, model=None, **options
):
    return MaskedLMTask(
        model or make_model(dropout),
        functools.partial(optimizer, lr=lr),
        micro_batch_tokens=micro_sequences * SEQLEN,
        **{"max_steps": 4, "warmup_fraction": 0.0, **options},
    )


def fit(task, folder, data=None, stop=None, ckpt_path=None, callbacks=(), logger=False):
    trainer = make_trainer(
        stop or task.max_steps,
        [Checkpoints(folder=str(folder), every_n_steps=1, keep_last=99), *callbacks],
        logger=logger,
    )
    trainer.fit(task, data or Sentences(), ckpt_path=ckpt_path, weights_only=True)
    return trainer


SGD = {"optimizer": lambda model, lr: torch.optim.SGD(model.parameters(), lr), "lr": 0.5}


def test_update_does_not_depend_on_split_or_form_of_the_batch(tmp_path):
    """Sequences hold unequal numbers of masked tokens, so a mean of means would differ by far."""
    whole = make_task(**SGD)
    fit(whole, tmp_path / "whole")
    for micro_sequences, packed in ((1, True), (2, True), (1, False), (4, False)):
        other = make_task(micro_sequences=micro_sequences, loss_chunk_tokens=3, **SGD)
        fit(other, tmp_path / f"{micro_sequences}-{packed}", Sentences(packed))
        for name, value in weights(whole).items():
            torch.testing.assert_close(weights(other)[name], value, rtol=1e-4, atol=1e-6)


def test_stop_and_resume_equals_no_stop_bitwise(tmp_path):
    straight, first, second = (make_task(dropout=0.2) for _ in range(3))
    fit(straight, tmp_path / "straight")
    fit(first, tmp_path / "cut", stop=3)
    second.model.reset_parameters()
    torch.rand(7)  # a resumed process has another random state
    fit(second, tmp_path / "cut", ckpt_path=newest_intact(tmp_path / "cut"))
    for name, value in weights(straight).items():
        assert torch.equal(weights(second)[name], value), name


def test_first_loss_is_transformers_and_speeds_count_real_tokens(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = make_model()
    export_bert(model, tmp_path / "hf")
    theirs = transformers.BertForPreTraining.from_pretrained(tmp_path / "hf").eval()
    padded = batch(0, packed=False)
    with torch.no_grad():
        expected = theirs(
            input_ids=padded["input_ids"],
            token_type_ids=padded["segment_ids"],
            attention_mask=(torch.arange(SEQLEN) < LENGTHS[:, None]).long(),
            labels=padded["labels"],
            next_sentence_label=padded["nsp_labels"],
        ).loss
    task = make_task(model=model, micro_sequences=1)
    for packed in (True, False):
        logger = CsvLogger(save_dir=str(tmp_path / f"log-{packed}"))
        metrics = Metrics(every_n_steps=2, show=False)
        fit(task, tmp_path / f"run-{packed}", Sentences(packed), 2, None, [metrics], logger)
        header, first, second = (tmp_path / f"log-{packed}/metrics.csv").read_text().splitlines()
        first, second = (
            dict(zip(header.split(","), row.split(","), strict=True)) for row in (first, second)
        )
        assert [row["tokens"] for row in (first, second)] == ["27", "54"]  # 12 + 3 + 7 + 5
        rates = [float(second[f"{kind}_per_s"]) for kind in ("tokens", "samples")]
        assert rates[0] / rates[1] == pytest.approx(27 / 4)
        if packed:
            parts = float(first["train/mlm_loss"]) + float(first["train/nsp_loss"])
            assert parts == pytest.approx(float(first["train/loss"]), rel=1e-6)
            assert float(first["train/loss"]) == pytest.approx(expected.item(), rel=1e-5)


def test_held_out_means_count_each_label_once(tmp_path):
    task = make_task(max_steps=2)
    trainer = fit(task, tmp_path)
    assert task.validated_step == 2
    got = {name: float(value) for name, value in trainer.callback_metrics.items()}
    masked, pairs = [], []
    for entries in (batch(1000, packed=False), batch(1001, packed=False, filled=2)):
        with torch.no_grad():
            hidden = task.model.eval().hidden(
                entries["input_ids"], segment_ids=entries["segment_ids"], lengths=LENGTHS
            )
            logits = task.model.mlm_logits(hidden).log_softmax(-1)
            nsp_logits = task.model.nsp_logits(task.model.pooled(hidden)).log_softmax(-1)
        for row, column in (entries["labels"] != -100).nonzero().tolist():
            label = int(entries["labels"][row, column])
            scores = logits[row, column]
            masked.append((-float(scores[label]), int(scores.argmax()) == label))
        for label, scores in zip(entries["nsp_labels"].tolist(), nsp_logits, strict=True):
            if label != -100:
                pairs.append((-float(scores[label]), int(scores.argmax()) == label))
    assert len(pairs) == 6
    for names, entries in (("mlm_loss", "accuracy"), masked), (("nsp_loss", "nsp_accuracy"), pairs):
        for name, values in zip(names, zip(*entries, strict=True), strict=True):
            assert got[f"val/{name}"] == pytest.approx(sum(values) / len(values), rel=1e-4)
    assert got["val/loss"] == pytest.approx(got["val/mlm_loss"] + got["val/nsp_loss"])


def test_model_without_nsp_head_trains_on_masked_tokens_alone(tmp_path):
    task = make_task(model=make_model(nsp_head=False, pooler=False, num_segments=1))
    trainer = fit(task, tmp_path)
    names = {name for name in trainer.callback_metrics if name.startswith("val/")}
    assert names == {"val/loss", "val/mlm_loss", "val/accuracy"}
    assert trainer.callback_metrics["val/loss"] == trainer.callback_metrics["val/mlm_loss"]


def test_flops_count_what_is_multiplied():
    """Depth 2, width 16: 12 w^2 + 13 w weights a block; MLM head w^2 + 3 w + 64 and 64 w shared."""
    task = make_task()
    entries = batch(0)
    work = {name: int(amount) for name, amount in task.work(entries).items()}
    masked = int((entries["labels"] != -100).sum())
    pairs = 12**2 + 3**2 + 7**2 + 5**2
    assert work == {"tokens": 27, "samples": 4, "pairs": pairs, "masked": masked}
    blocks = 2 * (12 * 16**2 + 13 * 16)
    head = 16**2 + 3 * 16 + 64 + 64 * 16
    pooler = 16**2 + 16 + 2 * 16 + 2
    products = 27 * blocks + masked * head + 4 * pooler
    assert task.flops(work) == {"full": 6 * products + 12 * 2 * 16 * pairs}


def test_run_ends_at_its_target_and_a_resumed_one_stays_there(tmp_path):
    def target(at_least=0.0, **options):
        return StopAtTarget(at_least=at_least, **options)

    first = target()
    trainer = fit(make_task(), tmp_path, callbacks=[first])
    assert trainer.global_step == 2 and first.reached[0] == 2
    last = newest_intact(tmp_path)
    resumed = target()
    assert fit(make_task(), tmp_path, ckpt_path=last, callbacks=[resumed]).global_step == 2
    assert resumed.reached == first.reached
    raised = target(at_least=1.1)
    assert fit(make_task(), tmp_path, ckpt_path=last, callbacks=[raised]).global_step == 4
    assert raised.reached is None
    with pytest.raises(ValueError, match="one of .*val/accuracy.*, got val/ppl"):
        fit(make_task(), tmp_path / "other", callbacks=[target(metric="val/ppl")])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"nsp_head": False}, "only an NSP head trains the pooler: set model.pooler=false"),
        ({"mlm_head": False}, "must have an MLM head: set model.mlm_head=true"),
    ],
)
def test_model_that_cannot_be_trained_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make_task(model=make_model(**changes))


def test_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="micro-batches of 3; change task.micro_batch_tokens or"):
        make_task(micro_sequences=3).micro_batch(PER_STEP, SEQLEN)
