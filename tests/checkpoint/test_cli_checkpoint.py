"""`pentamesh checkpoint` and `pentamesh export --best` on a run that was trained, stopped and gone on with; and on what is no checkpoint."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pentamesh import cli
from pentamesh.checkpoint.manifest import MANIFEST, Manifest, name_of, verify
from pentamesh.checkpoint.names import BEST, LATEST, point
from pentamesh.job.precision import PRECISIONS
from pentamesh.plan.plan import Plan
from pentamesh.run.asked import read_asked
from pentamesh.run.evaluate import evaluate
from pentamesh.run.folder import RunFolder
from pentamesh.run.launch import keep
from pentamesh.run.loop import run
from pentamesh.run.options import Options
from pentamesh.run.world import join
from pentamesh.run.worlds import run_world
from tests.run import toy


def rank(folder: Path, options: Options) -> str:
    plan = Plan.read(RunFolder(folder).plan)
    return run(plan, RunFolder(folder), join(plan.layout, "cpu"), options).outcome


def trained(job: Path, options: Options) -> RunFolder:
    folder = keep(read_asked(job), options, even_so=False)
    run_world(rank, Plan.read(folder.plan).layout.mesh.num_ranks, folder.path, options)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run over two ranks, best early since its rate rises until it learns nothing any more, stopped at step 3 and gone on with to step 6."""
    where = tmp_path_factory.mktemp("job")
    job = toy.job(
        where,
        optimizer={"lr": 1.0, "schedule": "constant", "warmup_steps": 6},
        training={"steps": 6, "evaluate_every": 5},
        checkpoint={"every": 1, "keep": 1, "keep_every": 4, "keep_best": True},
    )
    trained(job, Options(stop_at=3))
    return trained(job, Options(resume=True))


@pytest.fixture
def folder(made: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the run, to be spoiled."""
    shutil.copytree(made.path, tmp_path / "run")
    return RunFolder(tmp_path / "run")


class Done:
    """What a command left: its exit code, and what it wrote."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def pentamesh(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line in this process, as its own entry point starts it."""

    def call(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["pentamesh", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert "nobody expected" not in said.err
        return Done(int(left.value.code or 0), said.out, said.err)

    return call


def flip(checkpoint: Path) -> Path:
    path = sorted(checkpoint.glob("*.safetensors"))[0]
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    return path


def losses(folder: RunFolder) -> dict[int, float]:
    rows = [json.loads(line) for line in folder.held_out.read_text().splitlines()]
    return {row["step"]: row["held_out_loss"] for row in rows}


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.glob("step-*"))


def bits(checkpoint: Path, kind: str = "") -> dict[str, bytes]:
    """The bytes of whole tensors, for a checkpoint that has them whole."""
    found = {name: tensor for path in checkpoint.glob("*.safetensors") for name, tensor in load_file(path).items() if name.startswith(kind)}
    return {name: tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


def test_each_saved_checkpoint_is_evaluated_and_the_best_stays(made: RunFolder) -> None:
    evaluated = losses(made)
    assert sorted(evaluated) == [0, 1, 2, 3, 4, 5, 6]
    best = min(range(1, 7), key=evaluated.__getitem__)
    assert names(made) == sorted({name_of(step) for step in (best, 4, 6)})
    assert {Manifest.read(made.checkpoints / name).facts["held_out_loss"] for name in names(made)} <= set(evaluated.values())
    found = json.loads((made.checkpoints / BEST).read_text())
    assert (found["step"], found["folder"], found["held_out_loss"]) == (best, name_of(best), evaluated[best])
    assert json.loads((made.checkpoints / LATEST).read_text())["step"] == 6
    assert best != 6


def test_list_says_what_there_is(made: RunFolder, pentamesh: Any) -> None:
    done = pentamesh("checkpoint", "list", made.path, "--json")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["schema"], [row["folder"] for row in found["checkpoints"]]) == ("pentamesh.checkpoints", names(made)[::-1])
    newest, evaluated = found["checkpoints"][0], losses(made)
    assert (newest["step"], newest["num_ranks"], newest["precision"], newest["consumed_samples"]) == (6, 2, "fp32", 48)
    assert (newest["layout"], newest["held_out_loss"]) == ({"strategy": "full_shard", "mesh": "dp_shard 2"}, evaluated[6])
    assert newest["holds"] == ["weights", "optimizer state", "random state"]
    assert newest["bytes"] == sum(path.stat().st_size for path in (made.checkpoints / name_of(6)).iterdir())
    pointers = {name: row["step"] for row in found["checkpoints"] for name in row["pointers"]}
    assert pointers == {"latest": 6, "best": min(range(1, 7), key=evaluated.__getitem__)}
    assert (found["unfinished"], found["lost_pointers"]) == ([], {})
    assert json.loads(pentamesh("checkpoint", "list", made.checkpoints, "--json").out) == found

    text = pentamesh("checkpoint", "list", made.path).out
    assert all(word in text for word in ("step-00000006", "full shard on dp_shard 2", "fp32", f"{evaluated[6]:.4f}", "latest", "best"))
    one = pentamesh("checkpoint", "list", made.checkpoints / name_of(6))
    assert len(one.out.splitlines()) == 2


def test_list_says_what_is_unfinished_or_cannot_be_read(folder: RunFolder, pentamesh: Any) -> None:
    (folder.checkpoints / "step-00000007.partial").mkdir()
    (folder.checkpoints / "step-00000007.partial" / "shard").write_bytes(bytes(1000))
    (folder.checkpoints / "step-00000002.removed").mkdir()
    (folder.checkpoints / name_of(6)).rename(folder.checkpoints / "step-00000006.replaced")
    (folder.checkpoints / name_of(4) / MANIFEST).write_text("{}")
    done = pentamesh("checkpoint", "list", folder.path)
    assert done.code == 0
    assert "step-00000007.partial (1 kB) is being written, or was left by a run that died" in done.out
    assert "step-00000002.removed (0 B) is being removed" in done.out
    assert "step-00000006.replaced was saved anew and the run died at that" in done.out
    assert "step-00000004: manifest.json is not a checkpoint's manifest" in done.out
    assert "latest.json names step-00000006, which is not there" in done.out


def test_list_and_verify_are_without_torch(made: RunFolder) -> None:
    code = "import sys; from pentamesh.cli import app; app(standalone_mode=False); print([m for m in ('torch', 'numpy') if m in sys.modules])"
    for command in ("list", "verify"):
        done = subprocess.run(
            [sys.executable, "-c", code, "checkpoint", command, str(made.path)], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.splitlines()[-1] == "[]"
        assert done.stderr == ""


def test_verify_names_every_harm_and_what_a_resume_would_use(folder: RunFolder, pentamesh: Any) -> None:
    done = pentamesh("checkpoint", "verify", folder.path)
    assert done.code == 0
    assert done.out.splitlines()[-1] == "--resume would go on from step-00000006"
    flipped = flip(folder.checkpoints / name_of(6))
    done = pentamesh("checkpoint", "verify", folder.path)
    assert (done.code, "step-00000006  NOT WHOLE" in done.out) == (2, True)
    assert f"{flipped.name} is not as it was written: its SHA-256 differs" in done.out
    assert "--resume would go on from step-00000004" in done.out
    found = json.loads(pentamesh("checkpoint", "verify", folder.path, "--json").out)
    assert found["resume_from"] == "step-00000004"
    assert [row["is_whole"] for row in found["checkpoints"]] == [name != name_of(6) for name in names(folder)[::-1]]
    assert pentamesh("checkpoint", "verify", folder.checkpoints / name_of(4)).out == "step-00000004  whole\n"
    assert "--resume" not in pentamesh("checkpoint", "verify", folder.checkpoints / name_of(6)).out
    for name in names(folder)[:-1]:
        (folder.checkpoints / name / MANIFEST).unlink()
    done = pentamesh("checkpoint", "verify", folder.path)
    assert (done.code, done.out.splitlines()[-1]) == (2, "--resume would have nothing to go on from")


def test_the_best_is_exported(folder: RunFolder, pentamesh: Any) -> None:
    evaluated = losses(folder)
    best = min(range(1, 7), key=evaluated.__getitem__)
    done = pentamesh("export", folder.path, "--best", "--to", folder.path / "best", "--dtype", "float32")
    assert (done.code, done.out.strip()) == (0, str(folder.path / "best"))
    assert json.loads((folder.path / "best" / "pentamesh.json").read_text())["step"] == best
    job = Plan.read(folder.plan).job
    assert evaluate(job, folder.path / "best", PRECISIONS["fp32"]).loss == pytest.approx(evaluated[best], abs=1e-5)
    flip(folder.checkpoints / name_of(best))
    done = pentamesh("checkpoint", "export", folder.path, "--best", "--to", folder.path / "best")
    assert done.code == 0
    assert f"passing over checkpoint {name_of(best)}" in done.err
    assert json.loads((folder.path / "best" / "pentamesh.json").read_text())["step"] != best


def test_one_that_was_to_be_replaced_is_exported_by_its_step(folder: RunFolder, pentamesh: Any) -> None:
    (folder.checkpoints / name_of(6)).rename(folder.checkpoints / "step-00000006.replaced")
    done = pentamesh("export", folder.path, "--step", "6", "--to", folder.path / "six")
    assert done.code == 0, done.err
    assert json.loads((folder.path / "six" / "pentamesh.json").read_text())["step"] == 6


def test_convert_is_exported_and_gone_on_from_as_the_checkpoint_is(made: RunFolder, folder: RunFolder, tmp_path: Path, pentamesh: Any) -> None:
    """A run of two ranks in many files, one of one rank in few: the same bits."""
    checkpoint = folder.checkpoints / name_of(4)
    done = pentamesh("checkpoint", "convert", checkpoint, tmp_path / "whole", "--file-size", "40kB")
    assert (done.code, done.out.strip()) == (0, str(tmp_path / "whole"))
    converted = tmp_path / "whole"
    assert verify(converted) == []
    before, after = Manifest.read(checkpoint), Manifest.read(converted)
    assert after.tensors == before.tensors
    assert (after.step, len(after.files) > 1) == (4, True)
    assert after.facts.pop("converted_from")["folder"] == name_of(4)
    assert after.facts == before.facts
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "whole"]

    apart = pentamesh("export", converted, "--to", tmp_path / "apart", "--model", tmp_path / "run" / ".." / "run" / "export")
    assert apart.code == 0
    pentamesh("export", folder.path, "--step", "4", "--to", tmp_path / "of-run")
    assert bits(tmp_path / "apart") == bits(tmp_path / "of-run")

    for name in names(folder):
        shutil.rmtree(folder.checkpoints / name)
    shutil.move(converted, folder.checkpoints / name_of(4))
    run_world(rank, 2, folder.path, Options(resume=True))
    assert names(folder) == sorted({name_of(4), name_of(6), name_of(min((4, 5, 6), key=losses(made).__getitem__))})
    assert bits(folder.export) == bits(made.export)
    assert losses(folder) == losses(made)


def test_convert_of_weights_alone(folder: RunFolder, tmp_path: Path, pentamesh: Any) -> None:
    checkpoint = folder.checkpoints / name_of(6)
    assert pentamesh("checkpoint", "convert", checkpoint, tmp_path / "w", "--weights-only", "--dtype", "bfloat16").code == 0
    pentamesh("checkpoint", "convert", checkpoint, tmp_path / "all")
    narrow, whole = load_file(tmp_path / "w" / "whole-00001-of-00001.safetensors"), bits(tmp_path / "all", "model.")
    assert narrow.keys() == whole.keys()
    for name, tensor in narrow.items():
        assert torch.equal(tensor.flatten(), torch.frombuffer(bytearray(whole[name]), dtype=torch.float32).bfloat16())
    assert "weights only, of step 6" in pentamesh("checkpoint", "list", tmp_path / "w").out
    done = pentamesh("checkpoint", "convert", checkpoint, tmp_path / "x", "--dtype", "bfloat16")
    assert (done.code, "add --weights-only" in done.err) == (2, True)
    assert pentamesh("checkpoint", "convert", checkpoint, tmp_path / "x", "--weights-only", "--dtype", "int8").code == 2
    assert pentamesh("checkpoint", "convert", checkpoint, tmp_path / "x", "--file-size", "much").code == 2
    assert not (tmp_path / "x").exists()


def test_convert_writes_over_nothing_and_leaves_nothing(folder: RunFolder, tmp_path: Path, pentamesh: Any) -> None:
    checkpoint = folder.checkpoints / name_of(6)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    for target, said in [
        (tmp_path / "there", "there is there already"),
        (tmp_path / "link", "link is there already"),
        (tmp_path / "there" / "mine", "mine is there already"),
        (checkpoint, "is there already"),
        (checkpoint / "inside", "would lie in the checkpoint"),
    ]:
        done = pentamesh("checkpoint", "convert", checkpoint, target)
        assert (done.code, done.out) == (2, "")
        assert said in done.err
    assert "several checkpoints" in pentamesh("checkpoint", "convert", folder.path, tmp_path / "x").err
    assert verify(checkpoint) == []
    assert pentamesh("checkpoint", "convert", checkpoint, tmp_path / "empty").code == 0
    flip(checkpoint)
    done = pentamesh("checkpoint", "convert", checkpoint, tmp_path / "x")
    assert (done.code, "its SHA-256 differs" in done.err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "run", "there"]


def test_paths_that_lead_to_no_checkpoint(folder: RunFolder, tmp_path: Path, pentamesh: Any) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    unfinished = folder.checkpoints / "step-00000009.partial"
    unfinished.mkdir()
    bare = tmp_path / "bare"
    shutil.copytree(folder.path, bare, ignore=shutil.ignore_patterns("step-*"))
    for path, said in [
        (tmp_path / "nowhere", f"there is no {tmp_path / 'nowhere'}"),
        (tmp_path / "file", "file is a file"),
        (tmp_path / "empty", "empty holds no checkpoint"),
        (folder.export, "export is a Hugging Face model folder and holds no checkpoint"),
        (unfinished, "step-00000009.partial is no finished checkpoint"),
        (bare, "no checkpoint is there yet"),
        (bare / "checkpoints", "no checkpoint is there yet"),
        ("x" * 300, "File name too long"),
    ]:
        for command in (("list",), ("verify",), ("convert", "to"), ("export", "--to", "to")):
            done = pentamesh("checkpoint", command[0], path, *command[1:])
            assert (done.code, done.out) == (2, "")
            assert said in done.err


def test_export_of_what_is_unclear(folder: RunFolder, tmp_path: Path, pentamesh: Any) -> None:
    checkpoint, apart = folder.checkpoints / name_of(6), tmp_path / "apart"
    shutil.copytree(checkpoint, apart)
    for arguments, said in [
        ((folder.path, "--step", "6", "--best"), "--step 6 and --best each name a checkpoint"),
        ((checkpoint, "--best"), "is one checkpoint already"),
        ((folder.path, "--step", "5"), "there is no checkpoint of step 5"),
        ((apart, "--to", tmp_path / "x"), "add --model FOLDER"),
        ((apart, "--model", folder.export), "add --to FOLDER"),
        ((apart, "--model", tmp_path / "nowhere", "--to", tmp_path / "x"), "there is no model folder"),
        ((apart, "--model", folder.export, "--to", tmp_path / "x", "--push", "a/b"), "the run that would say it is not here"),
    ]:
        done = pentamesh("export", *arguments)
        assert (done.code, done.out) == (2, "")
        assert said in done.err
    for name in names(folder):
        path = folder.checkpoints / name / MANIFEST
        found = Manifest.read(path.parent)
        found.facts.pop("held_out_loss")
        path.write_text(found.text())
    point(folder.checkpoints / name_of(6))
    assert not (folder.checkpoints / BEST).exists()
    assert "no whole checkpoint has a held-out loss" in pentamesh("export", folder.path, "--best").err


class Trap:
    """A pickle that leaves a trace where it is opened."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("planted", [".metadata", "optimizer.pt", "__0_0.distcp"])
def test_a_planted_pickle_is_refused_and_never_opened(folder: RunFolder, tmp_path: Path, pentamesh: Any, planted: str) -> None:
    checkpoint = folder.checkpoints / name_of(6)
    (checkpoint / planted).write_bytes(pickle.dumps(Trap(tmp_path / "opened")))
    assert pentamesh("checkpoint", "list", folder.path).code == 0
    for command in (("verify",), ("convert", tmp_path / "to"), ("export", "--to", tmp_path / "to")):
        done = pentamesh("checkpoint", command[0], checkpoint, *command[1:])
        assert done.code == 2
        assert f"{planted} is a pickle and not part of the checkpoint" in done.out + done.err
    assert not (tmp_path / "opened").exists()
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("outside", ["../../../../secret", "/etc/hostname", "link"])
def test_names_and_links_do_not_lead_out_of_the_folder(folder: RunFolder, tmp_path: Path, pentamesh: Any, outside: str) -> None:
    checkpoint = folder.checkpoints / name_of(6)
    found = Manifest.read(checkpoint)
    name = next(iter(found.files))
    (checkpoint / name).rename(tmp_path / "secret")
    if outside == "link":
        (checkpoint / name).symlink_to(tmp_path / "secret")
    else:
        files = {outside if key == name else key: file for key, file in found.files.items()}
        (checkpoint / MANIFEST).write_text(Manifest(found.step, found.facts, found.tensors, files).text())
    said = "is a link or a folder" if outside == "link" else "is not the plain name of a file"
    listed = json.loads(pentamesh("checkpoint", "list", folder.path, "--json").out)["checkpoints"][0]
    assert listed["bytes"] == sum(path.stat().st_size for path in checkpoint.iterdir() if not path.is_symlink())
    for command in (("verify",), ("convert", tmp_path / "to"), ("export", "--to", tmp_path / "to")):
        done = pentamesh("checkpoint", command[0], checkpoint, *command[1:])
        assert done.code == 2
        assert said in done.out + done.err
    assert not (tmp_path / "to").exists()


def test_what_a_strangers_manifest_says_is_shown_as_text(folder: RunFolder, pentamesh: Any) -> None:
    checkpoint = folder.checkpoints / name_of(6)
    found = Manifest.read(checkpoint)
    facts: dict[str, Any] = {"counters": [1], "layout": {"dp_shard": "x"}, "precision": "\x1b[31mred", "world_size": {"a": 1}, "held_out_loss": "low"}
    (checkpoint / MANIFEST).write_text(Manifest(6, found.facts | facts | {"saved_at": 7}, found.tensors, found.files).text())
    done = pentamesh("checkpoint", "list", folder.path)
    assert done.code == 0
    assert "\x1b" not in done.out
    assert "\\x1b[31mred" in done.out
    (checkpoint / MANIFEST).write_text('{"schema":' + "[" * 100_000)
    assert "step-00000006: manifest.json is not a checkpoint's manifest" in pentamesh("checkpoint", "list", folder.path).out
