"""Nothing that can be chosen is left out of the table that the invariants run over."""

from __future__ import annotations

import pkgutil

import pytest

from hf_kvcache import codecs, retention, tiers

from .architectures import build
from .configs import CONFIGURATIONS


@pytest.fixture(scope="module")
def groups() -> list:
    """Every group of layers of every configuration."""
    config = build("llama").config
    return [group for row in CONFIGURATIONS.values() for group in row.build(config).storage.groups]


def test_every_codec_has_a_row(groups):
    assert set(codecs.CODECS) == {group.store.sealed.codec.name for group in groups}


def test_every_retention_rule_has_a_row(groups):
    assert set(retention.RETENTIONS.values()) == {type(group.retention) for group in groups}


def test_every_tier_has_a_row(groups):
    assert set(tiers.TIERS.values()) == {type(group.tier) for group in groups}


@pytest.mark.parametrize(
    ("package", "table", "shared"),
    [
        (codecs, codecs.CODECS, {"base", "packing"}),
        (retention, retention.RETENTIONS, {"base"}),
        (tiers, tiers.TIERS, {"base", "blobs", "ladder"}),
    ],
    ids=["codecs", "retention", "tiers"],
)
def test_every_module_is_in_its_table(package, table, shared):
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)} - shared
    assert modules == {type(make()).__module__.rsplit(".", 1)[-1] for make in table.values()}
