import stat
from pathlib import Path

import pytest

from sluice.errors import SetupError
from sluice.tls import read_pair
from supervisor.certificates import RENEW_DAYS, Authority


def test_certificates_are_made_once_and_belong_to_their_user(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    made = authority.ensure(["gateway", "batcher"])
    assert [file.parent.name for file in made] == ["gateway", "batcher"]
    assert authority.ensure(["gateway", "batcher"]) == []
    for file in authority.folder.rglob("*.*"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(authority.folder.stat().st_mode) == 0o700
    assert [one.process for one in authority.issued()] == ["ca", "batcher", "gateway"]


def test_what_is_about_to_expire_or_lacks_a_name_is_made_again(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    Authority(tmp_path, days=RENEW_DAYS).ensure(["gateway"])
    before = read_pair(authority.of("gateway"))
    assert authority.ensure(["gateway"], ["models.example"])
    assert read_pair(authority.of("gateway")) != before
    assert authority.issued()[1].names == ("localhost", "models.example", "127.0.0.1", "::1")
    assert authority.ensure(["gateway"]) == []


def test_renewed_certificates_keep_their_names(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.ensure(["gateway", "batcher"], ["models.example"])
    before = authority.issued()
    assert [file.parent.name for file in authority.renew(["gateway"])] == ["gateway"]
    assert [one.names for one in authority.issued()] == [one.names for one in before]
    with pytest.raises(SetupError, match="no certificate of 'none'; known: batcher, gateway"):
        authority.renew(["none"])


def test_without_its_key_an_authority_gives_none(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="sluice certs create"):
        Authority(tmp_path).issued()
    Authority(tmp_path).ensure(["gateway"])
    (tmp_path / "ca.key").unlink()
    with pytest.raises(SetupError, match=r"ca.key: the key of the authority cannot be read"):
        Authority(tmp_path).ensure(["batcher"])
