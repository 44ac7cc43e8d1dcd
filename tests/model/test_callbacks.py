from types import SimpleNamespace

import pytest
import torch

from model.callbacks import Metrics, StopAfter, peak_flops


@pytest.mark.parametrize(
    "device, tflops",
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
    ],
)
def test_peak_is_found_by_the_longest_matching_name(device, tflops):
    assert peak_flops(device) == tflops * 1e12


def test_unknown_device_has_no_peak_rather_than_a_wrong_one():
    assert peak_flops("Some GPU 9000") is None


@pytest.mark.parametrize("name, words", [("NVIDIA L4", "121.0"), ("Some GPU 9000", "not known")])
def test_training_starts_on_every_gpu_and_says_its_peak(name, words, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    trainer = SimpleNamespace(global_step=0, max_steps=1, is_global_zero=True, loggers=[])
    Metrics().on_train_start(trainer, SimpleNamespace(device=torch.device("cuda")))
    shown = capsys.readouterr().out
    assert name in shown and words in shown


def test_interval_is_checked():
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        Metrics(every_n_steps=0)


def test_a_start_of_a_run_ends_after_its_minutes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("model.callbacks.time.monotonic", lambda: now[0])
    decided = SimpleNamespace(reduce_boolean_decision=lambda mine, all: mine)
    trainer = SimpleNamespace(global_step=10, should_stop=False, strategy=decided)
    stop, never = StopAfter(minutes=2), StopAfter()
    for callback, seconds, step, ends in (
        (never, 999, 10, False),
        (stop, 119, 10, False),
        (stop, 121, 11, False),  # processes look at the clock, and agree, at every tenth step
        (stop, 121, 20, True),
    ):
        now[0], trainer.global_step = 100.0 + seconds, step
        callback.on_train_batch_end(trainer, None, None, None, 0)
        assert trainer.should_stop == ends
    assert not stop.state_dict(), "a resumed run has its minutes anew"
    with pytest.raises(ValueError, match="minutes must be positive or null, got 0"):
        StopAfter(minutes=0)
