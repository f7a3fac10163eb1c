"""C39: memory and files are of one instant, and what is in memory file systems comes along."""

from __future__ import annotations

from sojourn.client import Process, Session
from support.servers import eventually

WRITER = r"""
import mmap, os, sqlite3, sys
os.makedirs("/srv/w")
log = open("/srv/w/log", "ab", buffering=0)
area_file = open("/srv/w/map", "w+b"); area_file.truncate(4096)
area = mmap.mmap(area_file.fileno(), 4096)
database = sqlite3.connect("/srv/w/db", isolation_level=None)
database.execute("pragma journal_mode=wal")
database.execute("create table t (n integer primary key)")
memory = open("/tmp/counter", "w+")
count = 0
print("ready", flush=True)
while True:
    count += 1
    log.write(b"%d\n" % count)
    area[:8] = count.to_bytes(8, "big")
    database.execute("insert into t values (?)", (count,))
    memory.seek(0); memory.write(str(count)); memory.flush()
    if count % 50 == 0:
        print(count, flush=True)
"""

CHECK = r"""
import sqlite3
lines = open("/srv/w/log").read().split("\n")
assert lines[-1] == "", "a torn line"
numbers = [int(line) for line in lines[:-1]]
assert numbers == list(range(1, len(numbers) + 1)), "the log has a gap or a repetition"
mapped = int.from_bytes(open("/srv/w/map", "rb").read(8), "big")
database = sqlite3.connect("/srv/w/db")
assert database.execute("pragma integrity_check").fetchone() == ("ok",)
rows, top = database.execute("select count(*), max(n) from t").fetchone()
assert rows == top, "rows are missing"
memory = int(open("/tmp/counter").read())
low, high = len(numbers) - 1, len(numbers)
assert low <= mapped <= high, (mapped, high)
assert low <= top <= high, (top, high)
assert low <= memory <= high, (memory, high)
print(len(numbers))
"""


def check(session: Session, process: Process) -> int:
    """Stop the writer at whatever it does, compare all it wrote, let it go on."""
    process.signal("STOP")
    checked = session.exec(["python3", "-c", CHECK])
    assert checked.exit_code == 0, checked.stderr.decode()
    process.signal("CONT")
    return int(checked.text)


def test_c39_counters_in_memory_and_on_disk_agree_at_every_resume(session: Session) -> None:
    session.update(policy={"auto_snapshot": "off"})
    process = session.spawn(["python3", "-c", WRITER])
    assert eventually(lambda: process.refresh().info.stdout[1] > 10)
    last = 0
    for round in range(3):
        session.suspend()
        session.resume()
        now = check(session, process)
        assert now > last
        last = now
        assert eventually(lambda seen=last: check(session, process) > seen), "the writer goes on"
        taken = session.snapshot(f"live {round}")
        [fork] = session.fork(1, snapshot=taken)
        assert check(fork, fork.process(process.id)) >= last
        fork.delete()
        session.rollback(taken)
        last = check(session, process)
    assert session.verify().ok


def test_c39_files_alone_are_as_after_a_power_cut(session: Session) -> None:
    """Without memory the processes end; what they had written is whole."""
    session.update(policy={"auto_snapshot": "off"})
    process = session.spawn(["python3", "-c", WRITER.replace("/tmp/counter", "/srv/w/counter")])
    assert eventually(lambda: process.refresh().info.stdout[1] > 10)
    session.suspend(memory=False)
    checked = session.exec(["python3", "-c", CHECK.replace("/tmp/counter", "/srv/w/counter")])
    assert checked.exit_code == 0, checked.stderr.decode()


def test_memory_file_systems_come_along(session: Session) -> None:
    session.exec("echo a > /tmp/a; echo b > /dev/shm/b; mkdir -p /run/app; echo c > /run/app/c")
    session.exec("chown 1000 /tmp/a; chmod 640 /tmp/a; ln -s a /tmp/link; mkfifo /tmp/pipe")
    look = "cat /tmp/a /dev/shm/b /run/app/c; stat -c '%u %a %F' /tmp/a /tmp/link /tmp/pipe"
    before = session.exec(look).text
    assert before.startswith("a\nb\nc\n")
    session.suspend()
    assert session.exec(look).text == before
    [fork] = session.fork(1)
    fork.exec("echo changed > /tmp/a")
    assert fork.exec("cat /tmp/a").text == "changed\n"
    assert session.exec(look).text == before
    fork.delete()
    session.pause()
    assert session.exec(look).text == before
