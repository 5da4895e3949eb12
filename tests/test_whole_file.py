"""Files appear whole or not at all, with the permissions that the user chose."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_checkpoint_attacks import files_of_at_most
from workbench.cli.console import one_line
from workbench.whole_file import check_writable, write_text


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    write_text("one", tmp_path / "new" / "file.json")
    (tmp_path / "plain").write_text("")
    modes = {path.stat().st_mode for path in (tmp_path / "new" / "file.json", tmp_path / "plain")}
    assert {mode & 0o777 for mode in modes} == {0o640}


def test_a_failed_write_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_text("old", path)
    with pytest.raises(UnicodeEncodeError):
        write_text("new \ud800", path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file.json"]


def test_a_full_disk_names_the_file_and_not_the_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_text("new", tmp_path / "plan.json")
    assert one_line(caught.value) == f"{tmp_path / 'plan.json'}: No space left on device"


def test_links_stay_links(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text("text", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_devices_are_written_to_and_not_replaced(tmp_path: Path) -> None:
    write_text("text", Path(os.devnull))
    assert not Path(os.devnull).is_file()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text("text", pipe)
    assert os.read(reader, 10) == b"text"
    os.close(reader)


def test_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write_text("text", tmp_path)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="wants a file system without files of users")
def test_what_cannot_be_written_is_found_early_whatever_permissions_say() -> None:
    """Those of /proc allow its owner all."""
    with pytest.raises(ValueError, match=r"/proc/new/plan\.json: cannot be written, /proc is no folder"):
        check_writable(Path("/proc/new/plan.json"))


def test_a_full_disk_is_found_early(tmp_path: Path) -> None:
    with files_of_at_most(0), pytest.raises(ValueError, match="may write to: File too large"):
        check_writable(tmp_path / "new" / "plan.json")
    assert not list(tmp_path.iterdir())


def test_devices_and_pipes_may_be_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path(os.devnull), tmp_path / "pipe"):
        check_writable(path)
