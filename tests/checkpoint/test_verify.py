"""What checkpoint.verify finds, and when."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax_checkpoints import restore_latest

from maxmeg.checkpoint import storage
from maxmeg.checkpoint.integrity import CorruptCheckpointError
from maxmeg.checkpoint.manager import Checkpointer
from maxmeg.checkpoint.places import sizes_of
from maxmeg.config.schema import Verify


@pytest.mark.parametrize("verify", Verify)
def test_wrong_bytes_on_the_disk_are_found(folder, monkeypatch, verify):
    """Read back, the save fails; else the restore does, and checksums name the file."""
    tree, wanted = {"w": jnp.arange(8.0)}, {"w": jax.ShapeDtypeStruct((8,), jnp.float32)}
    checkpointer = Checkpointer(folder, verify=verify)
    assert checkpointer.save(1, tree, {}) and checkpointer.wait()

    def damage(future, tensor, checked=storage.checked):
        result = checked(future, tensor)
        for name in sizes_of(folder):
            if name.startswith("step_00000002") and name.endswith("w/c/0"):
                data = (folder / name).read_bytes()
                (folder / name).write_bytes(data[:5] + b"x" + data[6:])
        return result

    monkeypatch.setattr(storage, "checked", damage)
    assert checkpointer.save(2, tree, {})
    assert checkpointer.wait() == (verify is not Verify.readback)
    if verify is Verify.readback:
        assert "w does not hold the bytes that were written" in str(checkpointer.last_error)
        assert checkpointer.steps() == [1]
    else:
        named = {
            Verify.crc: "tensor w: .*arrays/w/c/0.*Digest mismatch",
            Verify.off: "values differ",
        }
        with pytest.raises(CorruptCheckpointError, match=named[verify]):
            checkpointer.restore(2, wanted)
    actual = restore_latest(checkpointer, wanted)
    assert actual is not None and actual[0] == 1
    np.testing.assert_array_equal(actual[1]["w"], tree["w"])
