import pytest

from model.callbacks import Metrics, peak_flops


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


def test_interval_is_checked():
    with pytest.raises(ValueError, match="every_n_steps must be at least 1, got 0"):
        Metrics(every_n_steps=0)
