"""The page on data parallelism: each sentence on saving and loading has a test, which this file names or is."""

import os
import re

import pytest
import torch
from sentences import ROOT, check_held, holders, sentences

from funcops import dist
from funcops.checkpoint import SMALL
from funcops.distributed import Mesh
from funcops.testing import run_ranks

PAGE = (ROOT / "docs" / "data-parallel.md").read_text()
BEFORE, _, REST = PAGE.partition("## Checkpoints for any mesh\n")
SECTION, _, AFTER = REST.partition("\n## ")
ONE = Mesh.abstract({"dp": 1}, 0)


def like_on_meta_takes_no_memory(folder):
    """1,024 TiB of `like`: its shapes are read, and compared, and nothing of it is made."""
    dist.save({"w": torch.arange(4.0)}, folder, {}, ONE)
    with pytest.raises(ValueError, match=r"mis-shaped: w \[281474976710656\], got \[4\]"):
        dist.load(folder, {"w": torch.empty(2**48, device="meta")}, {}, ONE)
    assert torch.equal(dist.load(folder, {"w": torch.empty(4, device="meta")}, {}, ONE)["w"], torch.arange(4.0))


def it_has_the_shapes_of_a_rank(folder):
    specs = {"w": dist.Spec("tp", 0)}
    run_ranks({"tp": 2}, lambda mesh: dist.save({"w": torch.full((2,), float(mesh.rank))}, folder, specs, mesh))
    read = lambda mesh: dist.load(folder, {"w": torch.empty(1, device="meta")}, specs, mesh)["w"].item()  # noqa: E731
    assert run_ranks({"tp": 4}, read) == [0, 0, 1, 1]


def small_files_are_compared(folder):
    assert SMALL == 256 * 2**20


def values_alone_are_read(folder):
    """Without the files of the tensors."""
    specs = {"w": dist.Spec("tp", 0)}
    tree = lambda mesh: {"w": torch.ones(2), "step": 1000, "run": {"note": "x", "lr": 0.1, "tied": True}}  # noqa: E731
    run_ranks({"tp": 4}, lambda mesh: dist.save(tree(mesh), folder, specs, mesh))
    said = {"step": 1000, "run.note": "x", "run.lr": 0.1, "run.tied": True}
    assert dist.load_values(folder) == said
    read = set()
    opened = type(folder).open

    def noted(self, *args, **kwargs):
        read.add(self.name)
        return opened(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(folder), "open", noted)
        assert dist.load_values(folder) == said
    for name in set(os.listdir(folder)) - read - {".metadata"}:
        (folder / name).unlink()
    assert dist.load_values(folder) == said


HOSTILE, OVER_RANKS = "tests/distributed/test_hostile_checkpoints.py::", "tests/distributed/test_saves_of_ranks.py::"
KILLED, SAVED = "tests/distributed/test_killed_saves.py::", "tests/distributed/test_dist_checkpoint.py::"
UNEVEN = "tests/distributed/test_uneven_shards.py::"
DATA, RUNS = "tests/distributed/test_checkpoint_data.py::", "tests/examples/test_train_lm_ranks.py::"
HELD = {  # by how each sentence begins: what holds it
    "`dist.save` writes a folder": (
        f"{DATA}test_torch_reads_and_writes_them",
        f"{SAVED}test_any_mesh_reads_files_of_any_other",
        f"{SAVED}test_a_run_goes_on_on_another_mesh_and_in_one_process",
    ),
    "`like` has this rank's shapes": (it_has_the_shapes_of_a_rank, like_on_meta_takes_no_memory),
    "A folder is written beside": (
        f"{KILLED}test_a_save_that_is_killed_leaves_the_old_or_the_new",
        f"{KILLED}test_a_save_that_is_interrupted_leaves_the_old_or_the_new",
    ),
    "Before that the ranks compare": (
        f"{SAVED}test_no_shard_goes_in_as_if_all_had_it",
        f"{OVER_RANKS}test_copies_that_differ_in_a_bit_are_seen",
        "tests/checkpoint/test_checksums.py::test_each_bit_and_its_place_change_the_hash",
    ),
    "`save` replaces a checkpoint": (
        f"{OVER_RANKS}test_a_checkpoint_or_nothing_is_replaced",
        f"{OVER_RANKS}test_what_is_no_checkpoint_is_not_replaced",
        f"{OVER_RANKS}test_two_saves_to_one_path_are_kept_apart",
        f"{OVER_RANKS}test_a_save_that_begins_while_another_ends_is_kept_apart",
    ),
    "If a rank makes a mistake": (
        f"{OVER_RANKS}test_a_mistake_on_one_rank_of_a_save_raises_on_all",
        f"{OVER_RANKS}test_a_disk_that_is_full_raises_on_all_and_keeps_the_old",
    ),
    "The index has a checksum": (small_files_are_compared, f"{HOSTILE}test_a_large_file_is_compared_on_request"),
    "Checkpoints without checksums load": (f"{HOSTILE}test_torch_may_write_over_it", f"{DATA}test_torch_reads_and_writes_them"),
    "A file that is cut": (
        f"{KILLED}test_a_file_that_is_cut_short_is_named",
        f"{HOSTILE}test_a_file_that_is_too_long_is_refused",
        f"{HOSTILE}test_a_shard_that_holds_something_else_is_refused",
        f"{HOSTILE}test_no_pickle_runs_code",
    ),
    "A checkpoint that a save replaces": f"{OVER_RANKS}test_a_checkpoint_that_is_replaced_while_it_is_read_is_refused",
    "`load_values` reads": values_alone_are_read,
    "[More](": "tests/pages/test_site.py::test_a_link_of_the_site_that_leads_nowhere_is_seen",
}
ELSEWHERE = {  # sentences of other sections
    "**At its end** you can": f"{SAVED}test_any_mesh_reads_files_of_any_other",
    "`specs_of` gives their leaves": f"{UNEVEN}test_leaves_of_any_size_move_between_meshes_by_the_specs_of_either",
    "The losses equal": f"{RUNS}test_losses_equal_one_process",
}


def test_each_sentence_has_a_test():
    check_held(sentences(SECTION), HELD)
    others = [one for text in (BEFORE, AFTER) for one in sentences(text)]
    check_held([one for one in others if re.search(r"checkpoint|--resume|dist\.(save|load)", one)], ELSEWHERE)


@pytest.mark.parametrize("check", [one for one in holders(HELD) if callable(one)], ids=lambda check: check.__name__)
def test_sentence(check, tmp_path):
    check(tmp_path / "a")
