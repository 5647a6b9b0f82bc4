"""Python's garbage in training: collected after the same steps everywhere."""

import gc

import pytest

from maxmeg.runtime.garbage import collected_every


@pytest.mark.parametrize(("interval", "wanted"), [(0, []), (3, [1, 3, 6]), (1, [1, 2, 3, 4, 5, 6])])
def test_garbage_is_collected_after_these_steps(monkeypatch, interval, wanted):
    gc.unfreeze()  # Python 3.12 begins with frozen objects
    before, collections, steps = gc.isenabled(), [], []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(steps[-1]))
    with pytest.raises(KeyboardInterrupt), collected_every(interval) as collect:
        for step in range(1, 7):
            steps.append(step)
            collect(step)
            assert gc.isenabled() == (before and not interval)
            assert (gc.get_freeze_count() > 0) == bool(interval)
        raise KeyboardInterrupt
    assert collections == wanted
    assert gc.isenabled() == before and gc.get_freeze_count() == 0
