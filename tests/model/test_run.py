import json

import pytest
import torch

import train
from model.checkpoint import AtomicCheckpointIO
from model.run import Run, plan_run, record_run


def start(tmp_path, name="mine", step=None):
    run = plan_run(name, str(tmp_path))
    record_run(run, "seed: 1\n")
    if step is not None:
        path = run.folder / "checkpoints" / f"step-{step:08d}.ckpt"
        AtomicCheckpointIO().save_checkpoint({"global_step": step, "w": torch.zeros(2)}, path)
    return run


def test_taken_name_gets_the_next_number(tmp_path):
    folders = [start(tmp_path).folder.name for _ in range(3)]
    assert folders == ["mine", "mine-2", "mine-3"]


def test_resume_auto_continues_the_newest_with_a_checkpoint(tmp_path):
    start(tmp_path, step=3)
    second = start(tmp_path, step=8)
    start(tmp_path)  # died before its first checkpoint
    start(tmp_path, name="mine-too", step=99)  # another name
    resumed = plan_run("mine", str(tmp_path), resume="auto")
    assert resumed.folder == second.folder
    assert resumed.run_id == second.run_id
    assert resumed.ckpt_path.name == "step-00000008.ckpt"


def test_resume_auto_starts_anew_where_there_is_nothing(tmp_path):
    run = plan_run("mine", str(tmp_path), resume="auto")
    assert run.ckpt_path is None and run.folder == tmp_path / "mine"


def test_ckpt_path_continues_in_the_folder_of_its_run(tmp_path):
    run = start(tmp_path, step=5)
    path = run.folder / "checkpoints" / "step-00000005.ckpt"
    resumed = plan_run("other", str(tmp_path), ckpt_path=str(path))
    assert (resumed.folder, resumed.run_id) == (run.folder.resolve(), run.run_id)


def test_records_of_a_continued_run_keep_the_first(tmp_path):
    run = start(tmp_path)
    record_run(run, "seed: 2\n")
    assert (run.folder / "config.yaml").read_text() == "seed: 1\n"
    assert (run.folder / "config-2.yaml").read_text() == "seed: 2\n"
    facts = json.loads((run.folder / "run.json").read_text())
    assert facts["run_id"] == run.run_id and facts["versions"]["torch"] == torch.__version__


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(SystemExit, match="error: .*Not a directory"),
        train.one_line_errors(train.BUILD_ERRORS),
    ):
        record_run(Run(tmp_path / "file/run", "id", None), "")


def test_processes_that_share_a_name_never_number_it(tmp_path):
    run = start(tmp_path)
    assert plan_run("mine", str(tmp_path), shared_name=True).folder == run.folder
    start(tmp_path, name="trained", step=1)
    with pytest.raises(FileExistsError, match="resume=auto or choose another run_name"):
        plan_run("trained", str(tmp_path), shared_name=True)
    resumed = plan_run("trained", str(tmp_path), resume="auto", shared_name=True)
    assert resumed.ckpt_path.name == "step-00000001.ckpt"


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"resume": "yes"}, ValueError, "resume must be null or auto, got 'yes'"),
        ({"resume": "auto", "ckpt_path": "x"}, ValueError, "not both"),
        ({"ckpt_path": "nowhere.ckpt"}, FileNotFoundError, "there is none at nowhere.ckpt"),
        ({"ckpt_path": __file__}, ValueError, "must lie in a run's checkpoints folder"),
    ],
)
def test_contradictions_are_refused(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        plan_run("mine", str(tmp_path), **options)
