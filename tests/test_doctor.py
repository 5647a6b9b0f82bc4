"""The preflight: it measures every device, and names those that are slow."""

import pytest

from maxmeg import doctor
from maxmeg.doctor import Options
from maxmeg.runtime.preflight import Speeds, slow_devices

H100 = "NVIDIA H100 80GB HBM3"


def test_a_healthy_machine_is_measured(capsys):
    doctor.main(Options(matrix=64, size_mb=0.1))
    out = capsys.readouterr().out
    for part in ("jaxlib", "8 x cpu", "matrix product, TFLOP/s", "all-reduce over 8, GB/s"):
        assert part in out, part
    assert out.endswith("no problems found\n")


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        ([Speeds(700, 2900)] * 8, H100, []),
        ([Speeds(700, 2900)] * 7 + [Speeds(500, 2900)], H100, ["device 7: matrix product 500"]),
        ([Speeds(700, 900)] * 8, H100, [f"device {i}: copy 900" for i in range(8)]),
        ([Speeds(1, 1), Speeds(9, 9)], "cpu", []),
    ],
)
def test_slow_devices_are_named(found, kind, words):
    lines = slow_devices(found, kind)
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))


def test_problems_give_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "slow_devices", lambda *_: ["device 3: slow"])
    with pytest.raises(SystemExit, match="1"):
        doctor.main(Options(matrix=64, size_mb=0.1))
    assert "problem: device 3: slow" in capsys.readouterr().out
