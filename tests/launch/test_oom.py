from fleetx.launch import oom


def test_counts_of_both_versions_of_control_groups(tmp_path, monkeypatch):
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "7").mkdir(parents=True)
    (proc / "7" / "cgroup").write_text("4:cpu,memory:/jobs/a\n0::/unit\n")
    (proc / "vmstat").write_text("nr_free_pages 1\noom_kill 3\n")
    (groups / "memory" / "jobs" / "a").mkdir(parents=True)
    (groups / "memory" / "jobs" / "a" / "memory.oom_control").write_text("under_oom 0\noom_kill 5\n")
    (groups / "unit").mkdir()
    (groups / "unit" / "memory.events").write_text("oom 9\noom_kill 9\n")
    monkeypatch.setattr(oom, "_PROC", proc)
    monkeypatch.setattr(oom, "_CGROUPS", groups)
    for file, text in (
        (proc / "vmstat", "oom_kill 4\n"),
        (groups / "memory" / "jobs" / "a" / "memory.oom_control", "oom_kill 6\n"),
        (groups / "unit" / "memory.events", "oom 10\noom_kill 10\n"),
    ):
        watch = oom.OutOfMemory(7)
        assert not watch.has_struck()
        file.write_text(text)
        assert watch.has_struck()


def test_a_machine_that_does_not_count_says_no(tmp_path, monkeypatch):
    monkeypatch.setattr(oom, "_PROC", tmp_path)
    assert not oom.OutOfMemory().has_struck()
