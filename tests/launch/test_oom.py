from fleetx.launch import oom


def test_counts_of_both_versions_of_control_groups(tmp_path, monkeypatch):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "self").mkdir()
    (proc / "7" / "cgroup").write_text("4:cpu,memory:/jobs/a\n0::/unit\n")
    (proc / "self" / "mountinfo").write_text(
        f"29 25 0:26 / {groups}/memory rw - cgroup cgroup rw,memory\n30 25 0:27 / {groups} rw - cgroup2 cgroup2 rw\n"
    )
    (proc / "vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    (groups / "memory" / "jobs" / "a").mkdir(parents=True)
    (groups / "memory" / "jobs" / "a" / "memory.oom_control").write_text("under_oom 0\noom_kill 5\n")
    (groups / "unit").mkdir()
    (groups / "unit" / "memory.events").write_text("oom 9\noom_kill 9\n")
    monkeypatch.setattr(oom, "_PROC", proc)
    for file, text in (
        (proc / "vmstat", "oom_kill 4\n"),
        (groups / "memory" / "jobs" / "a" / "memory.oom_control", "oom_kill 6\n"),
        (groups / "unit" / "memory.events", "oom 10\noom_kill 10\n"),
    ):
        watch = oom.OutOfMemory(7)
        assert not watch.has_struck()
        file.write_text(text)
        assert watch.has_struck()


def test_a_container_that_sees_only_its_own_groups_counts_too(tmp_path, monkeypatch):
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("4:memory:/docker/x\n")
    (tmp_path / "self" / "mountinfo").write_text(f"29 25 0:26 /docker/x {tmp_path} rw - cgroup cgroup rw,memory\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill 0\n")
    monkeypatch.setattr(oom, "_PROC", tmp_path)
    watch = oom.OutOfMemory()
    (tmp_path / "memory.oom_control").write_text("oom_kill 1\n")
    assert watch.has_struck()


def test_a_machine_that_does_not_count_says_no(tmp_path, monkeypatch):
    monkeypatch.setattr(oom, "_PROC", tmp_path)
    assert not oom.OutOfMemory().has_struck()
