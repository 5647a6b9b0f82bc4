"""Logs of servers: long ones, of several starts, other files. And keys of servers."""

import json

import pytest

from maxmeg.__main__ import main
from maxmeg.inference.requests import Request
from maxmeg.inference.sampling import Sampling
from maxmeg.server.journal import Journal, read_log
from maxmeg.server.worker import Ticket

REQUESTS = 100_000  # copying the list for each line takes minutes


@pytest.mark.timeout(60)
def test_long_logs_are_read_in_one_pass(tmp_path):
    path = tmp_path / "log.jsonl"
    starts = [[{"engine": {"lanes": n}}, *({"id": i} for i in range(n))] for n in (3, REQUESTS)]
    path.write_text("".join(json.dumps(line) + "\n" for lines in starts for line in lines))
    shape, lines = read_log(str(path))
    assert shape == {"lanes": REQUESTS} and lines == starts[1][1:]


def test_a_full_disk_ends_the_log_alone(caplog):
    ticket = Ticket("1", (), Request(1, Sampling()), 0)
    file = open("/dev/full", "w")  # noqa: SIM115  (closing it fails too)
    journal = Journal(file, {"lanes": 1})
    for _ in range(3):
        journal.ended(ticket, 0.0)
    assert [record.message for record in caplog.records] == [
        "the log ends here, the server goes on: [Errno 28] No space left on device"
    ]
    with pytest.raises(OSError, match="No space left"):
        file.close()


def test_other_files_are_no_logs(tmp_path):
    path = tmp_path / "log.jsonl"
    for text, message in (('{"id": 1}', "is not the log of a server"), ("x", "line 1 is not JSON")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_log(str(path))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "node3"])
def test_other_machines_need_a_key(host, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"--host={host}", "--run_dir=none"])
    assert ended.value.code == 2 and "set --api_key=KEY" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--host=::1", "--run_dir=none"])
    assert "api_key" not in capsys.readouterr().err
