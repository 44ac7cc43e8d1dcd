from scripts import render_results


def test_readme_shows_what_the_records_hold():
    readme = (render_results.ROOT / "README.md").read_text()
    assert render_results.updated(readme) == readme, "run python -m scripts.render_results"


def test_a_changed_record_changes_the_readme(tmp_path, monkeypatch):
    readme = f"top\n{render_results.BEGIN}\nstale\n{render_results.END}\nbottom\n"
    monkeypatch.setattr(render_results, "RESULTS", tmp_path)
    assert "stale" not in render_results.updated(readme)
    drift = {"mean_abs": [0.001, 0.003], "max_abs": 0.004}
    record = {
        "command": "python -m scripts.compare_attention",
        "date": "2026-01-02T03:04:05+00:00",
        "hardware": {"gpus": ["NVIDIA H200"]},
        "versions": {"torch": "2.11.0", "triton": "3.6.0"},
        "settings": {"steps": 200, "batch_tokens": 131072},
        "rows": [],
        "loss_curves": [
            {
                "model": "gpt2_1k",
                "flash_to_sdpa": drift,
                "sdpa_to_sdpa": drift,
                "flash_minus_sdpa": -0.0001,
                "flash_within_noise": True,
            }
        ],
    }
    (tmp_path / "compare_attention.json").write_text(render_results.json.dumps(record))
    text = render_results.updated(readme)
    assert (
        "flash is 0.0020 nats from that of SDPA (mean of pairs: 2), and SDPA is 0.0010 to 0.0030"
        in text
    )
    assert text.startswith("top\n") and text.endswith("\nbottom\n")
