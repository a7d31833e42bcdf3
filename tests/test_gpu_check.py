"""The GPU script, rehearsed: it runs from end to end without a GPU, and a wrong kernel stops it before it times anything."""

from __future__ import annotations

import json

import pytest

import gpu_check
from hf_kvcache.codecs import CODECS
from hf_kvcache.kernels import cpu, cuda


def test_a_rehearsal_checks_times_and_writes_everything(tmp_path, capsys):
    gpu_check.main(["--rehearse", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("gpu-check-a-cpu-as-a-rehearsal-*.json")
    report = json.loads(path.read_text())
    checked = " ".join(check["check"] for check in report["checks"] if check["passed"])
    assert all(f"decode {codec} " in checked for codec in CODECS) and "offloaded:16" in checked and "disk:16" in checked
    sizes = {(a["context"], a["batch"]) for a in report["attention"]}
    assert sizes == {(64, 1), (192, 1), (64, 2), (192, 2)}
    assert {line["cache"] for line in report["lines"]} >= {"dynamic", "paged", "int4"}
    assert report["left_out"] == [] and all(p["ttft"] > 0 for p in report["first_tokens"])
    assert capsys.readouterr().out.rstrip().endswith(f"written: {path}")


@pytest.mark.skipif(cpu.load() is None, reason="the rehearsal's kernels are the native ones")
def test_a_wrong_kernel_is_timed_by_nobody(tmp_path, monkeypatch):
    decode = cpu.decode
    monkeypatch.setattr(cpu, "decode", lambda *arguments: (decode(*arguments)[0] * 1.01, decode(*arguments)[1]))
    with pytest.raises(gpu_check.WrongError, match=r"decode int4 .*2e-03 is right"):
        gpu_check.main(["--rehearse", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text())
    assert report["attention"] == report["steps"] == [] and any(not check["passed"] for check in report["checks"])


def test_what_does_not_fit_into_the_time_is_named(tmp_path):
    gpu_check.main(["--rehearse", "--minutes", "0", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    report = json.loads(path.read_text())
    assert report["attention"] == report["steps"] == [] and "attention at 64 x 1" in report["left_out"]


def test_a_mark_is_met_from_its_own_side():
    report = gpu_check.Report(path=None, about={})
    report.attention = [{"cache": "int8", "context": 32768, "batch": 8, "share": 0.81}]
    report.lines = [{"model": "m", "cache": "int4", "batch": 1, "slope_ratio": 0.31}]
    assert [mark["met"] for mark in gpu_check.marks(report)] == [True, False]


def test_without_a_device_the_script_says_so():
    if cuda.available():
        pytest.skip("there is a device")
    with pytest.raises(SystemExit, match="no CUDA device"):
        gpu_check.main([])
