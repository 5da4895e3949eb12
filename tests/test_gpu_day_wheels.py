"""What is carried to a machine without a network: which packages, asked of pip how, installed how."""

import sys
from pathlib import Path

import pytest

from experiments.gpu_day.wheels import (
    CONSTRAINTS,
    LACKING,
    MOST_BYTES,
    carried_bytes,
    download_command,
    install_command,
    main,
    pins,
)


def test_versions_are_those_that_the_tests_ran_with():
    text = "# versions\npydantic==2.1\npydantic_core==2.2\nsimpy==4 # engine\ntorch>=2\n"
    assert pins(text, ("simpy", "pydantic-core")) == ("simpy==4", "pydantic-core==2.2")
    with pytest.raises(ValueError, match="want a pin of torch"):
        pins(text, ("torch",))


def test_every_package_that_is_lacking_has_a_pin():
    assert len(pins(CONSTRAINTS.read_text())) == len(LACKING)


def test_pip_is_asked_for_wheels_of_that_python_alone():
    command = download_command(("simpy==4",), Path("wheels"), "3.12")
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--platform=manylinux_2_28_x86_64"} <= set(command)
    assert command[command.index("--python-version") + 1] == "3.12"
    assert command[-3:] == ["--dest", "wheels", "simpy==4"]


def test_they_are_installed_without_a_network():
    line = install_command(Path("wheels"), Path("/tmp/site"))
    assert "--no-index --no-deps" in line
    assert "--target /tmp/site wheels/*.whl" in line
    assert line.endswith("export PYTHONPATH=/tmp/site")


def test_what_is_too_much_to_carry_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no wheels"):
        carried_bytes(tmp_path)
    (tmp_path / "small.whl").write_bytes(b"12345")
    assert carried_bytes(tmp_path) == 5
    with (tmp_path / "large.whl").open("wb") as file:
        file.truncate(MOST_BYTES)
    with pytest.raises(ValueError, match=r"64\.0 MiB of wheels"):
        carried_bytes(tmp_path)


def test_what_pip_does_not_find_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    assert main([str(tmp_path / "wheels")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: pip: ")
