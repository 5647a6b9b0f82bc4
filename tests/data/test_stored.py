"""Arrays made once on a node: by one of several processes, whole or not at all."""

import os
import subprocess
import sys

import numpy as np
import pytest

from maxmeg.data.corpus.stored import cached, digest

MAKER = """
import sys, time, numpy as np
from maxmeg.data.corpus.stored import cached

def make():
    with open(sys.argv[1] + "/made", "a") as file:
        file.write("x")
    time.sleep(0.3)
    return {"a": np.arange(9)}

print(cached(sys.argv[1], "name", ["a"], make)["a"].sum())
"""


class Unwritable:
    def __array__(self, *_, **__):
        raise TypeError


def test_processes_that_start_at_once_make_it_once(tmp_path):
    command = [sys.executable, "-c", MAKER, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in running] == [b"36"] * 2
    assert (tmp_path / "made").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == [".lock", "made", "name"]


def test_nothing_is_left_of_a_failure(tmp_path):
    def fail():
        raise KeyError("no")

    with pytest.raises(KeyError):
        cached(str(tmp_path), "name", ["a"], fail)
    with pytest.raises(TypeError):  # in the middle of writing
        made = {"a": np.arange(3), "b": Unwritable()}
        cached(str(tmp_path), "name", ["a"], lambda: made)
    assert os.listdir(tmp_path) == [".lock"]
    actual = cached(str(tmp_path), "name", ["a"], lambda: {"a": np.arange(3)})
    assert isinstance(actual["a"], np.memmap) and actual["a"].tolist() == [0, 1, 2]
    assert isinstance(cached("", "name", ["a"], lambda: {"a": np.arange(3)})["a"], np.ndarray)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"not keep .* in .*/file/x: .*; name a folder .* data.cache_dir"
    ):
        cached(str(tmp_path / "file" / "x"), "name", [], dict)


def test_digests_tell_contents_apart():
    parts = [(1,), ("1",), (1, 1), (np.arange(3),), (np.arange(3.0),), (np.arange(4)[1:],)]
    parts += [(np.arange(3), 1), (np.arange(6).reshape(2, 3),), (np.arange(6).reshape(3, 2),)]
    assert len({digest(*part) for part in parts}) == len(parts)
    assert digest(np.arange(6)[::2]) == digest(np.array([0, 2, 4]))
