"""Files are noticed however they are replaced, and only when they say something else."""

from __future__ import annotations

import os
from pathlib import Path

from structlog.testing import capture_logs

from gateway.runtime.files import FileWatch


class Watched:
    """A file, and how often its watch was told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.told: list[str | None] = []
        self.files = FileWatch()
        self.files.add("it", lambda: [self.path], self.changed)

    async def changed(self) -> None:
        self.told.append(self.path.read_text() if self.path.exists() else None)

    async def look(self, times: int = 3) -> None:
        for _ in range(times):
            await self.files.look()


async def test_written_in_place_renamed_over_and_gone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("a")
    it = Watched(path)
    await it.look()
    assert it.told == []
    path.write_text("b")
    await it.look()
    new = tmp_path / "new"
    new.write_text("c")
    os.replace(new, path)
    await it.look()
    path.unlink()
    await it.look()
    path.write_text("d")
    await it.look()
    assert it.told == ["b", "c", None, "d"]


async def test_a_directory_of_links_swapped_as_kubernetes_does(tmp_path: Path) -> None:
    for name, text in (("..1", "a"), ("..2", "b")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kvgate.yaml").write_text(text)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "kvgate.yaml").symlink_to("..data/kvgate.yaml")
    it = Watched(tmp_path / "kvgate.yaml")
    (tmp_path / "..data_tmp").symlink_to("..2")
    os.replace(tmp_path / "..data_tmp", tmp_path / "..data")
    await it.look()
    assert it.told == ["b"]


async def test_the_same_content_is_no_change(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("a")
    it = Watched(path)
    os.utime(path, (1, 1))
    await it.look()
    new = tmp_path / "new"
    new.write_text("a")
    os.replace(new, path)
    await it.look()
    assert it.told == []


async def test_a_file_that_is_still_being_written_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("all of it")
    it = Watched(path)
    for text in ("", "half", "half and", "half and half"):
        path.write_text(text)
        await it.look(1)
    assert it.told == []
    await it.look(1)
    assert it.told == ["half and half"]


async def test_which_files_may_change_and_everybody_is_told_when_asked(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    it = Watched(one)
    it.path = two
    await it.look()
    assert it.told == ["2"], "other files are other contents"
    await it.files.look(asked=True)
    assert it.told == ["2", "2"]
    await it.look()
    assert it.told == ["2", "2"]


async def test_one_that_fails_does_not_keep_others_from_being_told(tmp_path: Path) -> None:
    it = Watched(tmp_path / "f")
    files = FileWatch()

    async def fail() -> None:
        raise RuntimeError("a bug")

    files.add("bad", lambda: [it.path], fail)
    files.add("good", lambda: [it.path], it.changed)
    with capture_logs() as logs:
        await files.look(asked=True)
    assert it.told == [None]
    assert [line["what"] for line in logs] == ["bad"]
