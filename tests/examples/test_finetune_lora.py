"""examples/09_finetune_lora.py, run as a user would."""

import pytest
from programs import check_picture, run


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return path


FLAGS = ["--base-steps", 12, "--rank", 2, "--lr", 0.02]


def test_adapters_learn_and_a_run_that_goes_on_gives_the_bits_of_one_that_did_not_end(text, tmp_path):
    said = run("09_finetune_lora.py", *FLAGS, "--text", text, "--folder", tmp_path / "one", "--steps", 16).splitlines()
    rows = {line[:40].strip(): line[40:].split() for line in said[-9:-1]}
    check_picture(tmp_path / "one" / "loss.png")
    before, after = map(float, rows["held-out loss, upper case"])
    assert after < before - 0.1 and rows["the same, merged"] == [f"{after:.3f}"]
    numbers = [int(n.replace(",", "")) for n in rows["numbers that learn"]]
    assert numbers[0] > 20 * numbers[1]
    for steps in (10, 16):
        said = run("09_finetune_lora.py", *FLAGS, "--text", text, "--folder", tmp_path / "two", "--steps", steps)
    assert "goes on after step 10" in said
    for name in ("base.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    said = run("09_finetune_lora.py", "--rank", 3, "--text", text, "--folder", tmp_path / "two", code=2)
    assert "load: " in said and "mis-shaped" in said


def test_frozen_weights_in_4_bits(text, tmp_path):
    said = run("09_finetune_lora.py", *FLAGS, "--weights", "nf4", "--text", text, "--folder", tmp_path, "--steps", 16).splitlines()
    rows = {line[:40].strip(): line[40:].split() for line in said[-9:-1]}
    before, after = map(float, rows["held-out loss, upper case"])
    whole, coded = (int(n.replace(",", "")) for n in rows["KiB of weights"])
    assert after < before - 0.1 and float(rows["the same, merged"][0]) == pytest.approx(after, abs=2e-3) and coded < 0.5 * whole


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--rank", "0"], "--rank: expected at least 1, got 0"),
        (["--lr", "2"], "--lr: expected a number between 0 and 1, got 2.0"),
        (["--text", "none.txt"], "--text: expected a file or a folder, got 'none.txt', which does not exist"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_flags_are_named(flags, error, tmp_path):
    assert error in " ".join(run("09_finetune_lora.py", "--folder", tmp_path / "none", *flags, code=2).split())
    assert not (tmp_path / "none").exists()
