"""Each source by itself, on texts and trees of machines we do not have; and the whole on the machine we do."""

from __future__ import annotations

import importlib.util
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from doctor import child, probes, probes_host, probes_nvidia, probes_other, probes_packages
from doctor.child import Outcome
from doctor.facts import Driver, Facts, Gpu, Host, Probe, facts_from_json, facts_to_json
from doctor.ledger import Ledger
from doctor.plan import diagnose
from doctor.trials import nvml as nvml_trial

GIB = 2**30


# ---- the whole, here ----------------------------------------------------------------------------------------------


def test_this_machine_gives_facts_that_survive_their_json() -> None:
    facts = probes.probe(children=False)
    assert facts.host.platform in ("linux", "wsl2", "darwin", "windows") and facts.host.python
    assert facts.host.ram_gib and facts.host.ram_gib > 0.5
    assert facts.host.free_gib is None or 0 < facts.host.free_gib <= facts.host.ram_gib
    again = facts_from_json(json.loads(json.dumps(facts_to_json(facts))))
    assert facts_to_json(again) == facts_to_json(facts)
    assert all(p == Probe() for p in facts.probes.values())


def test_every_source_failing_still_gives_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("this source is broken")

    for name in (
        "host",
        "packages",
        "toolkit",
        "driver_and_devices",
        "memory_holders",
        "pci_vendors",
        "_compilers",
        "amd_cards",
        "intel_cards",
        "apple_card",
        "available_gib",
    ):
        monkeypatch.setattr(probes, name, broken)
    monkeypatch.setattr(probes.child, "run", lambda *a, **k: Outcome("unstarted", error="no processes"))
    facts = probes.probe()
    assert isinstance(facts, Facts) and facts.host.platform is None
    unknown = facts.extra["unknown"]
    assert "this source is broken" in unknown["host"] and "this source is broken" in unknown["packages"]
    json.dumps(facts_to_json(facts))


def test_children_are_asked_only_for_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(probes.child, "run_all", lambda trials, timeout_s: asked.append(list(trials)) or {})
    everything = {"torch": "2.11.0", "vllm": "0.24.0", "bitsandbytes": "0.50", "unsloth": None}
    for versions, card in (
        ({"torch": "absent"}, True),
        (everything, False),
        (everything, True),
        ({"torch": "2.11.0", "vllm": "absent", "bitsandbytes": "absent", "unsloth": "absent"}, True),
    ):
        probes._run_children(versions, card, 1, lambda _: None)
    assert asked == [["cuda"], ["cuda", "bnb", "vllm_import", "unsloth"], ["cuda"]]


# ---- how a child's end becomes a fact ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "outcome", "ok", "words"),
    [
        ("torch_cuda", Outcome("ok", told={"torch_cuda": {"ok": True, "error": None}}), True, ""),
        ("torch_cuda", Outcome("ok", told={"torch_cuda": {"ok": False, "error": "Error 804"}}), False, "804"),
        ("torch_cuda", Outcome("error", "import torch", {}, "ImportError: libcudart.so.13"), False, "libcudart"),
        ("torch_cuda", Outcome("timeout", "CUDA start", {}, "no answer within 12 s"), False, "no answer"),
        ("torch_cuda", Outcome("timeout", "import torch", {}, "no answer within 24 s"), None, ""),
        ("torch_cuda", Outcome("unstarted", None, {}, "no child process"), None, ""),
        (
            "torch_cuda",
            Outcome("ok", told={"torch_cuda": {"ok": False, "error": "CUDA out of memory"}}),
            False,
            "memory",
        ),
        ("bnb_4bit", Outcome("crash", "NF4 matmul on cuda", {}, "x (killed by SIGSEGV)"), False, "SIGSEGV"),
        (
            "bnb_4bit",
            Outcome("error", "NF4 matmul on cuda", {}, "torch.OutOfMemoryError: CUDA out of memory"),
            None,
            "memory",
        ),
        ("vllm_import", Outcome("timeout", "import vllm.LLM", {}, "no answer within 24 s"), None, ""),
        (
            "fp8_matmul",
            Outcome("crash", "fp8 matmul per_row", {"fp8_matmul": {"ok": True, "error": None}}, "boom"),
            True,
            "",
        ),
    ],
)
def test_judge(name: str, outcome: Outcome, ok: bool | None, words: str) -> None:
    probe, why = probes.judge(name, outcome)
    assert probe.ok is ok and words in (probe.error or "")
    assert (why is not None) == (ok is None)


@pytest.mark.parametrize(
    ("code", "ok", "path", "wall", "closes_cpu"),
    [
        ("import os; os.abort()", False, None, "TORCH-IMPORT", True),
        ("raise ImportError('libtorch_cpu.so: undefined symbol: iJIT_NotifyEvent')", False, None, "TORCH-IMPORT", True),
        ("import time; time.sleep(60)", None, "cpu", "TORCH-SLOW", False),
    ],
    ids=["aborts", "raises", "hangs"],
)
def test_a_torch_that_cannot_be_imported_closes_every_path_the_cpu_included(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    ok: bool | None,
    path: str | None,
    wall: str,
    closes_cpu: bool,
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = child.run("cuda", timeout_s=1.5 if ok is None else 30)
    told = probes._torch_import(outcome)
    assert told is not None and told["ok"] is ok and told["error"], outcome
    packages = MappingProxyType({"torch": "2.13.0+cpu"})
    found = diagnose(Facts(gpus=(), packages=packages, extra=MappingProxyType({"torch_import": told})))
    assert found.plan.path == path and found.paths["cpu"].open is not closes_cpu
    assert wall in [w.code for w in found.walls]


def test_an_fp8_crash_does_not_take_the_matmul_with_it() -> None:
    told = {"torch_cuda": {"ok": True, "error": None}}
    outcomes = {"cuda": Outcome("crash", "fp8 matmul", told, "illegal instruction (killed by SIGILL)")}
    assert probes._judged("torch_cuda", outcomes, Ledger()) == Probe(True)
    assert probes._judged("fp8_matmul", outcomes, Ledger()) == Probe(False, "illegal instruction (killed by SIGILL)")
    outcomes = {"cuda": Outcome("crash", "CUDA start", {}, "killed by SIGSEGV")}
    assert probes._judged("torch_cuda", outcomes, Ledger()).ok is False
    assert probes._judged("fp8_matmul", outcomes, Ledger()) == Probe()  # it never came to that


# ---- driver and cards ----------------------------------------------------------------------------------------------


def nvml(**told: Any) -> Outcome:
    return Outcome("ok", told=told)


def device(
    index: int, name: str, uuid: str, capability: list[int] | None, total: float | None, free: float | None, **more: Any
) -> dict[str, Any]:
    return {
        "nvml_index": index,
        "name": name,
        "uuid": uuid,
        "capability": capability,
        "mig": False,
        "slices": [],
        "holders": [],
        "total": None if total is None else int(total * GIB),
        "free": None if free is None else int(free * GIB),
        **more,
    }


def seen(
    index: int, name: str, uuid: str | None, capability: list[int], total: float, free: float, **more: Any
) -> dict[str, Any]:
    return {
        "index": index,
        "name": name,
        "uuid": uuid,
        "capability": capability,
        "total": int(total * GIB),
        "free": int(free * GIB),
        "integrated": False,
        **more,
    }


@pytest.fixture
def no_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_nvidia, "_SMI_PLACES", ())
    monkeypatch.setenv("PATH", "")


def test_driver_from_nvml() -> None:
    ledger = Ledger()
    outcome = nvml(
        libcuda=13000, driver="580.95.05", cuda=13000, devices=[device(0, "NVIDIA L4", "GPU-1", [8, 9], 22, 21)]
    )
    driver, devices = probes_nvidia.driver_and_devices(outcome, ledger)
    assert driver == Driver("580.95.05", "13.0") and devices and devices[0]["name"] == "NVIDIA L4"
    assert ledger.sources["driver"] == "NVML"


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"nvml_error": 18, "why": "NVML: x"}, "a reboot loads the new one (NVML error 18)"),
        ({"nvml_error": 9, "why": "NVML: x"}, "the NVIDIA driver is not loaded"),
        ({"why": "nvidia-ml-py is not installed"}, "nvidia-ml-py is not installed; nvidia-smi was not found"),
    ],
)
def test_why_there_is_no_driver(no_smi: None, told: dict[str, Any], words: str) -> None:
    ledger = Ledger()
    driver, devices = probes_nvidia.driver_and_devices(nvml(**told), ledger)
    assert driver.version is None and devices is None and words in ledger.unknowns["driver"]


def test_libcuda_alone_still_tells_the_cuda_version(no_smi: None) -> None:
    assert probes_nvidia.driver_and_devices(nvml(libcuda=12080, why="no pynvml"), Ledger())[0].cuda == "12.8"


def fake_smi(folder: Path, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!{sys.executable}\nimport sys\nquery = ' '.join(sys.argv[1:])\n{script}")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


@pytest.mark.skipif(os.name != "posix", reason="a script as a program")
@pytest.mark.parametrize(
    ("script", "version", "cuda", "count", "words"),
    [
        (
            "print('0, NVIDIA L4, GPU-1, 570.86, 23034, 22491, [N/A], 8.9' if 'query' in query else 'CUDA Version: 12.8 ')",
            "570.86",
            "12.8",
            1,
            None,
        ),
        (  # a driver too old to know compute_cap
            "sys.exit(2) if 'compute_cap' in query else print('0, Tesla V100, GPU-1, 470.57, 16160, 16000, N/A')",
            "470.57",
            None,
            1,
            None,
        ),
        (
            "print('NVIDIA-SMI has failed'); sys.exit(9)",
            None,
            None,
            None,
            "the NVIDIA driver is not loaded (nvidia-smi exit 9)",
        ),
        ("sys.exit(12)", None, None, None, "the NVML library is missing (nvidia-smi exit 12)"),
        ("sys.exit(15)", None, None, None, "fallen off the bus"),
        (
            "print('Failed to initialize NVML: Driver/library version mismatch'); sys.exit(18)",
            None,
            None,
            None,
            "reboot",
        ),
        ("print('odd words'); sys.exit(77)", None, None, None, "odd words (nvidia-smi exit 77)"),
        ("print('No devices were found'); sys.exit(6)", None, None, 0, "no card was found"),
    ],
)
def test_nvidia_smi_as_second_source(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    version: str | None,
    cuda: str | None,
    count: int | None,
    words: str | None,
) -> None:
    fake_smi(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    ledger = Ledger()
    driver, devices = probes_nvidia.driver_and_devices(nvml(why="nvidia-ml-py is not installed"), ledger)
    assert (driver.version, driver.cuda) == (version, cuda)
    assert (None if devices is None else len(devices)) == count
    assert words is None or words in ledger.unknowns["driver"]


def test_smi_rows() -> None:
    text = (
        "0, NVIDIA GB10, GPU-1, 580.95, [N/A], [N/A], [N/A], 12.1\nnonsense\n"
        "1, NVIDIA L4, GPU-2, 580.95, 23034, 22491, Disabled, 8.9\n"
    )
    devices, version = probes_nvidia.parse_smi(text, probes_nvidia._SMI_FIELDS)
    assert version == "580.95" and [d["total"] for d in devices] == [None, 23034 * 2**20]
    assert devices[0]["capability"] == [12, 1] and devices[1]["free"] == 22491 * 2**20


def test_cuda_order_wins_and_memory_follows_the_uuid() -> None:
    slow, fast = (
        device(0, "NVIDIA T1000", "GPU-aaaa", [7, 5], 4, 3.5),
        device(1, "NVIDIA GB300", "GPU-bbbb", [10, 3], 276, 275),
    )
    gpus, order = probes_nvidia.cards(
        [slow, fast],
        [seen(0, "NVIDIA GB300", "bbbb", [10, 3], 275, 200), seen(1, "NVIDIA T1000", "aaaa", [7, 5], 4, 1)],
        None,
        None,
    )
    assert [(g.index, g.name, g.total_gib, g.free_gib) for g in gpus] == [
        (0, "NVIDIA GB300", 276.0, 275.0),
        (1, "NVIDIA T1000", 4.0, 3.5),
    ]
    assert order == [1, 0]


def test_cards_without_uuid_match_by_place_or_lone_name() -> None:
    two = [device(0, "NVIDIA L4", "GPU-1", [8, 9], 22, 20), device(1, "NVIDIA L4", "GPU-2", [8, 9], 22, 5)]
    gpus, order = probes_nvidia.cards(two, [seen(i, "NVIDIA L4", None, [8, 9], 22, 1) for i in (0, 1)], None, None)
    assert [g.free_gib for g in gpus] == [20.0, 5.0] and order == [0, 1]
    mixed = [device(0, "NVIDIA T4", "GPU-1", [7, 5], 15, 14), device(1, "NVIDIA L4", "GPU-2", [8, 9], 22, 5)]
    gpus, order = probes_nvidia.cards(mixed, [seen(0, "NVIDIA L4", None, [8, 9], 22, 1)], "1", None)
    assert gpus[0].free_gib == 5.0 and order == [1]


def test_mig_takes_memory_from_torch_not_from_the_parent() -> None:
    parent = device(
        0,
        "NVIDIA A100-SXM4-40GB",
        "GPU-1",
        [8, 0],
        40,
        39,
        mig=True,
        slices=[device(0, "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "MIG-2", None, 19.6, 19.5)],
    )
    gpus, _ = probes_nvidia.cards(
        [parent], [seen(0, "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "2", [8, 0], 19.6, 19.2)], None, None
    )
    assert (gpus[0].mig, gpus[0].total_gib, gpus[0].free_gib) == (True, 19.6, 19.2)
    gpus, _ = probes_nvidia.cards([parent], [], "MIG-...", None)  # no torch: the slices as NVML has them
    assert (gpus[0].mig, gpus[0].total_gib, gpus[0].name) == (True, 19.6, "NVIDIA A100-SXM4-40GB MIG 3g.20gb")


def test_unified_memory_takes_what_the_system_has_available() -> None:
    spark = device(0, "NVIDIA GB10", "GPU-1", [12, 1], None, None)
    gpus, _ = probes_nvidia.cards(
        [spark], [seen(0, "NVIDIA GB10", "1", [12, 1], 119, 60, integrated=True)], None, 110.0
    )
    assert (gpus[0].unified_memory, gpus[0].total_gib, gpus[0].free_gib) == (True, 119.0, 110.0)
    gpus, _ = probes_nvidia.cards([spark], [], None, 110.0)
    assert (gpus[0].unified_memory, gpus[0].total_gib, gpus[0].free_gib) == (True, None, 110.0)


@pytest.mark.parametrize(
    ("visible", "left"),
    [
        (None, [0, 1]),
        ("", [0, 1]),
        ("-1", [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-22", [1]),
        ("7", [0, 1]),
        ("MIG-x", [0, 1]),
    ],
)
def test_visible_devices(visible: str | None, left: list[int]) -> None:
    two = [device(0, "NVIDIA L4", "GPU-1111", [8, 9], 22, 20), device(1, "NVIDIA L4", "GPU-2222", [8, 9], 22, 5)]
    assert [d["nvml_index"] for d in probes_nvidia.visible_devices(two, visible)] == left


def test_numbers_of_unlike_cards_are_not_guessed() -> None:
    two = [device(0, "NVIDIA L4", "GPU-1111", [8, 9], 22, 20), device(1, "NVIDIA T4", "GPU-2222", [7, 5], 15, 5)]
    assert len(probes_nvidia.visible_devices(two, "1")) == 2


def test_holders_have_names_and_sizes_only() -> None:
    holders = [
        {"name": "/usr/bin/python3", "bytes": 7 * GIB, "doctor": False, "pid": 11},
        {"name": "Xorg", "bytes": None, "doctor": False, "pid": 12},
        {"name": "python", "bytes": 9 * GIB, "doctor": True, "pid": 13},
    ]
    found = probes_nvidia.memory_holders([device(3, "NVIDIA L4", "GPU-1", None, 22, 1, holders=holders)], [3])
    assert found == [
        {"gpu": 0, "name": "this Python process", "gib": 9.0},
        {"gpu": 0, "name": "python3", "gib": 7.0},
        {"gpu": 0, "name": "Xorg", "gib": None},
    ]


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="needs /proc")
def test_a_program_may_have_any_bytes_for_a_name() -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_bytes(b"caf\xe9")
        assert nvml_trial._program(None, os.getpid()) == "caf\ufffd"
    finally:
        name.write_bytes(before)


def test_no_uuid_reaches_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    uuid = "GPU-3f7a1c22-9d2b-4c1e-8f00-0123456789ab"
    told = {
        "driver": "580.95.05",
        "cuda": 13000,
        "libcuda": 13000,
        "devices": [device(0, "NVIDIA L4", uuid, [8, 9], 22, 21)],
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid)
    monkeypatch.setattr(probes.child, "run", lambda *a, **k: Outcome("ok", told=told))
    monkeypatch.setattr(
        probes.child,
        "run_all",
        lambda trials, timeout_s: {
            "cuda": Outcome("error", "CUDA start", {"devices": [seen(0, "NVIDIA L4", uuid[4:], [8, 9], 22, 21)]}, "bad")
        },
    )
    text = json.dumps(facts_to_json(probes.probe()))
    assert "3f7a1c22" not in text and '"CUDA_VISIBLE_DEVICES": "GPU-..."' in text and "NVIDIA L4" in text


# ---- toolkit -------------------------------------------------------------------------------------------------------


def fake_nvcc(root: Path, release: str) -> Path:
    (root / "bin").mkdir(parents=True)
    nvcc = root / "bin" / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.61'\n")
    nvcc.chmod(0o755)
    return root


@pytest.mark.skipif(os.name != "posix", reason="a script as a program")
def test_toolkit_order_is_flashinfers(tmp_path: Path) -> None:
    home, path, on_path, usual = (
        fake_nvcc(tmp_path / n, v) for n, v in (("a", "12.1"), ("b", "12.4"), ("c", "12.8"), ("d", "13.0"))
    )
    env = {"CUDA_HOME": str(home), "CUDA_PATH": str(path), "PATH": str(on_path / "bin")}
    found = []
    for drop in ("", "CUDA_HOME", "CUDA_PATH", "PATH"):
        env.pop(drop, None)
        tk = probes_nvidia.toolkit({**env, "PATH": env.get("PATH", "/nowhere")}, Ledger(), str(usual))
        found.append((tk.state, tk.nvcc, tk.where))
    assert found == [
        ("present", "12.1.61", "CUDA_HOME"),
        ("present", "12.4.61", "CUDA_PATH"),
        ("present", "12.8.61", "PATH"),
        ("present", "13.0.61", str(usual)),
    ]


def test_a_dead_cuda_home_hides_every_other_toolkit(tmp_path: Path) -> None:
    ledger = Ledger()
    good = fake_nvcc(tmp_path / "good", "13.0")
    found = probes_nvidia.toolkit({"CUDA_HOME": str(tmp_path / "gone"), "PATH": str(good / "bin")}, ledger, str(good))
    assert (found.state, found.nvcc, found.where) == ("absent", None, "CUDA_HOME")
    assert "holds no bin/nvcc" in ledger.sources["toolkit"]


def test_no_toolkit_and_an_unreadable_one(tmp_path: Path) -> None:
    assert probes_nvidia.toolkit({"PATH": "/nowhere"}, Ledger(), str(tmp_path / "none")).state == "absent"
    mute = fake_nvcc(tmp_path / "mute", "13.0")
    (mute / "bin/nvcc").write_text("#!/bin/sh\nexit 1\n")
    ledger = Ledger()
    assert probes_nvidia.toolkit({"CUDA_HOME": str(mute), "PATH": ""}, ledger).state == "unknown"
    assert "said nothing readable" in ledger.unknowns["toolkit.nvcc"]


def test_toolkits_beside_each_other(tmp_path: Path) -> None:
    fake_nvcc(tmp_path / "cuda-12.8", "12.8"), fake_nvcc(tmp_path / "cuda-13.0", "13.0")
    (tmp_path / "cuda-12.4").mkdir()
    assert probes_nvidia.installed_toolkits(tmp_path) == [str(tmp_path / "cuda-12.8"), str(tmp_path / "cuda-13.0")]


@pytest.mark.parametrize(
    ("container", "words"), [(True, "docker run --gpus all"), (False, "not installed or not loaded")]
)
def test_a_card_on_the_bus_without_a_driver(container: bool, words: str) -> None:
    ledger = Ledger()
    ledger.unknown("driver", "the NVML library is missing")
    probes._explain_missing_driver(Host("linux", container=container), ledger)
    assert ledger.unknowns["driver"].startswith("the NVML library is missing; ") and words in ledger.unknowns["driver"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize("form", ["per_tensor", "per_row"])
def test_the_fp8_trial_itself_is_right(form: str) -> None:
    """On the CPU, which has the same scaled matmul: if it failed there, a failure on a card would prove nothing."""
    import torch

    from doctor.trials import attempt, cuda

    assert attempt(cuda._fp8(torch, "cpu", form)) is None
    q, scale = cuda._to_fp8(torch, torch.randn(256, 256), "block", 128)
    assert scale.shape == (2, 2) and q.dtype == torch.float8_e4m3fn


# ---- other makers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (90006, "gfx906"),
        (90010, "gfx90a"),
        (90402, "gfx942"),
        (100300, "gfx1030"),
        (110001, "gfx1101"),
        (120001, "gfx1201"),
        (0, None),
    ],
)
def test_gfx_names(number: int, name: str | None) -> None:
    assert probes_other.gfx_name(number) == name


def test_amd_cards_from_sys(tmp_path: Path) -> None:
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, text in (
        (0, "cpu_cores_count 16\ngfx_target_version 0\n"),
        (1, "cpu_cores_count 0\ngfx_target_version 110000\ndrm_render_minor 128\n"),
    ):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "properties").write_text(text)
    drm = tmp_path / "sys/class/drm/renderD128/device"
    drm.mkdir(parents=True)
    (drm / "mem_info_vram_total").write_text(f"{24 * GIB}\n")
    (drm / "mem_info_vram_used").write_text(f"{2 * GIB}\n")
    (drm / "product_name").write_text("Radeon RX 7900 XTX\n")
    assert probes_other.amd_cards(tmp_path) == [
        Gpu(0, "amd", "Radeon RX 7900 XTX", None, "gfx1100", 24.0, 22.0, False, False)
    ]
    assert probes_other.amd_cards(tmp_path / "empty") == []


def test_rocminfo_text() -> None:
    text = """
*******
Agent 1
*******
  Name:                    AMD Ryzen 9
  Marketing Name:          AMD Ryzen 9
*******
Agent 2
*******
  Name:                    gfx906
  Marketing Name:          AMD Instinct MI50
  Pool Info:
    Pool 1
      Segment:                 GLOBAL; FLAGS: COARSE GRAINED
      Size:                    33538048(0x1ffc000) KB
"""
    assert probes_other.parse_rocminfo(text) == [Gpu(0, "amd", "AMD Instinct MI50", None, "gfx906", 31.98, None, False)]


def test_pci_and_intel(tmp_path: Path) -> None:
    for i, (kind, vendor) in enumerate(
        (("0x030000", "0x8086"), ("0x030200", "0x10de"), ("0x020000", "0x10de"), ("0x030000", "0x1a03"))
    ):
        folder = tmp_path / f"sys/bus/pci/devices/0000:0{i}:00.0"
        folder.mkdir(parents=True)
        (folder / "class").write_text(kind + "\n")
        (folder / "vendor").write_text(vendor + "\n")
    assert probes_other.pci_vendors(tmp_path) == ["intel", "nvidia"]
    assert [g.vendor for g in probes_other.intel_cards([], tmp_path)] == ["intel"]
    told = [{"name": "Intel Arc B580", "total": 12 * GIB, "free": 11 * GIB}]
    assert probes_other.intel_cards(told)[0] == Gpu(0, "intel", "Intel Arc B580", None, None, 12.0, 11.0, False, False)


@pytest.mark.parametrize(
    ("name", "vendor"),
    [
        ("NVIDIA GeForce RTX 4070", "nvidia"),
        ("AMD Radeon(TM) Graphics", "amd"),
        ("Intel(R) UHD", "intel"),
        ("Remote Display", None),
    ],
)
def test_vendor_of(name: str, vendor: str | None) -> None:
    assert probes_other.vendor_of(name) == vendor


def test_a_card_without_driver_is_still_a_card() -> None:
    gpus, _ = probes._all_cards(None, {}, "2.11.0+cu130", "linux", ["intel", "nvidia"], Ledger())
    assert gpus and gpus[0].vendor == "nvidia" and "without a working driver" in (gpus[0].name or "")


# ---- host and packages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wsl2"),
    [
        ("Linux version 5.15.167.4-microsoft-standard-WSL2 (root@x) (gcc ...)", True),
        ("Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com)", False),
        ("Linux version 6.8.0-45-generic (buildd@lcy02)", False),
        ("", False),
    ],
)
def test_wsl(text: str, wsl2: bool) -> None:
    assert probes_host.is_wsl2(text) is wsl2


@pytest.mark.parametrize(
    ("os_release", "tegra", "env", "name"),
    [
        ('NAME=x\nPRETTY_NAME="Ubuntu 22.04.4 LTS"\n', "", {}, "Ubuntu 22.04.4 LTS"),
        ("PRETTY_NAME=Alpine\n", "", {}, "Alpine"),
        ('PRETTY_NAME="Ubuntu 22.04"', "# R36 (release), REVISION: 4.0, GCID: 1", {}, "L4T R36.4.0 (Ubuntu 22.04)"),
        ('PRETTY_NAME="Ubuntu 22.04"', "", {"COLAB_RELEASE_TAG": "x"}, "Google Colab (Ubuntu 22.04)"),
        ('PRETTY_NAME="Ubuntu 22.04"', "", {"KAGGLE_KERNEL_RUN_TYPE": "x"}, "Kaggle (Ubuntu 22.04)"),
        ("", "", {}, None),
    ],
)
def test_linux_name(os_release: str, tegra: str, env: dict[str, str], name: str | None) -> None:
    assert probes_host.linux_name(os_release, tegra, env) == name


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("sys/fs/cgroup/memory.max", "8589934592\n", 8 * GIB),
        ("sys/fs/cgroup/memory.max", "max\n", None),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "4294967296\n", 4 * GIB),
    ],
)
def test_cgroup_limit(tmp_path: Path, name: str, text: str, limit: int | None) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    assert probes_host.cgroup_limit(tmp_path) == limit


_SYSTEM = {"proc/meminfo": "MemTotal: 67108864 kB\nMemFree: 1024 kB\nMemAvailable:   16777216 kB\n"}
_V2, _V1 = "sys/fs/cgroup/memory", "sys/fs/cgroup/memory/memory"


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, None),
        (_SYSTEM, 16 * GIB),
        ({**_SYSTEM, f"{_V2}.max": "max\n", f"{_V2}.current": f"{GIB}\n"}, 16 * GIB),
        ({**_SYSTEM, f"{_V2}.max": f"{8 * GIB}\n"}, 8 * GIB),  # use unknown: the limit bounds it
        ({**_SYSTEM, f"{_V2}.max": f"{8 * GIB}\n", f"{_V2}.current": f"{6 * GIB}\n"}, 2 * GIB),
        ({f"{_V2}.max": f"{8 * GIB}\n", f"{_V2}.current": f"{9 * GIB}\n"}, 0),
        ({f"{_V2}.max": f"{8 * GIB}\n", f"{_V2}.current": f"{7 * GIB}\n",
          f"{_V2}.stat": f"anon {5 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n"}, 3 * GIB),
        ({**_SYSTEM, f"{_V2}.max": f"{40 * GIB}\n", f"{_V2}.current": f"{GIB}\n"}, 16 * GIB),  # the system has less
        ({**_SYSTEM, f"{_V1}.limit_in_bytes": f"{8 * GIB}\n", f"{_V1}.usage_in_bytes": f"{7 * GIB}\n",
          f"{_V1}.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"}, 3 * GIB),
    ],
)  # fmt: skip
def test_room_is_what_the_system_and_the_container_both_leave(
    tmp_path: Path, files: dict[str, str], room: int | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert probes_host.room(tmp_path) == room


def test_container_marks(tmp_path: Path) -> None:
    assert probes_host._container({}, tmp_path) is False
    assert probes_host._container({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path) is True
    (tmp_path / ".dockerenv").touch()
    assert probes_host._container({}, tmp_path) is True


def test_environment_is_three_names_and_scrubbed() -> None:
    env = {
        "CUDA_VISIBLE_DEVICES": "MIG-3f7a1c22-9d2b-4c1e-8f00-0123456789ab",
        "HF_TOKEN": "hf_secretsecretsecret",
        "HOME": "/home/ada",
    }
    assert probes_host.environment(env) == {
        "CUDA_VISIBLE_DEVICES": "MIG-...",
        "CUDA_DEVICE_ORDER": None,
        "HF_HUB_OFFLINE": None,
    }


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (
            "__version__ = '2.11.0+cu130'\ndebug = False\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n",
            {"version": "2.11.0+cu130", "cuda": "13.0", "hip": None},
        ),
        (
            "__version__ = \"2.9.1\"\ncuda = '12.6'\nhip = None\nxpu: Optional[str] = None\n",
            {"version": "2.9.1", "cuda": "12.6", "hip": None, "xpu": None},
        ),
        ("garbage ==", {}),
    ],
)
def test_version_file(text: str, build: dict[str, str | None]) -> None:
    assert probes_packages.parse_version_file(text) == build


@pytest.mark.parametrize(
    ("version", "build", "tagged"),
    [
        ("2.11.0", {"version": "2.11.0+cu130", "cuda": "13.0"}, "2.11.0+cu130"),
        ("2.9.1", {"version": "2.9.1", "cuda": "12.6", "hip": None}, "2.9.1+cu126"),
        ("2.9.1", {"version": "2.9.1", "cuda": None, "hip": "6.3.42134"}, "2.9.1+rocm6.3"),
        ("2.9.1", {"version": "2.9.1", "cuda": None, "hip": None}, "2.9.1+cpu"),
        ("2.9.1", {}, "2.9.1"),
        ("absent", {}, "absent"),
        (None, {}, None),
    ],
)
def test_torch_tag(
    monkeypatch: pytest.MonkeyPatch, version: str | None, build: dict[str, str | None], tagged: str | None
) -> None:
    monkeypatch.setattr(probes_packages.sys, "platform", "linux")
    assert probes_packages.tagged(version, build) == tagged


def test_metadata_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "trl-1.16.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: trl\nVersion: 1.16.0\nRequires-Python: >=3.11\nRequires-Dist: transformers>=4.56.2\n"
        'Requires-Dist: vllm<=0.31.0,>=0.22.0; extra == "vllm"\nRequires-Dist: vllm; extra == "dev"\nRequires-Dist: rich\n'
    )
    (tmp_path / "vllm").mkdir()  # a bare folder is no package
    (tmp_path / "peft.py").write_text("")  # importable, no metadata
    code = (
        "import json; from doctor.probes_packages import packages; from doctor.ledger import Ledger\n"
        "l = Ledger(); v, m = packages(l); print(json.dumps([v, m, l.unknowns]))"
    )
    root = Path(probes.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        check=True,
    )
    versions, found, unknown = json.loads(done.stdout)
    assert versions["trl"] == "1.16.0" and versions["vllm"] == "absent" and versions["torch"] == "absent"
    assert versions["peft"] is None and "no metadata" in unknown["packages.peft"]
    assert found["requires"] == {"trl": ["transformers>=4.56.2", 'vllm<=0.31.0,>=0.22.0; extra == "vllm"']}
    assert found["requires_python"] == {"trl": ">=3.11"}


def test_nothing_heavy_is_imported_by_looking() -> None:
    code = (
        "import sys; from doctor.probes import probe; probe(children=False); import doctor.cli, doctor.notebook\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'vllm', 'pynvml', 'numpy', 'rich', 'grpo_portable')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
