"""Tests of the CPU gate with LLVM, pip, the engine and emulated CPUs: instructions, small wheels, and torch wheels."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import docker.errors
import numpy as np
import pytest
from machine import needs_the_machine
from wheel_parts import make_wheel

from engine.connect import connect
from flow import audit_wheel, extracted_tools, main_job
from flow.audit_wheel import FAIL, INCOMPLETE, PASS, Audited
from toolchain.config import Config
from toolchain.files import locked
from wheels import cpu_gate
from wheels.cpu_gate import CHECKED, UNCHECKED
from wheels.instructions import Disassembler, unsupported

CRC32 = 0xE1000040
"""crc32b r0, r0, r0 (A32): an instruction of ARMv8, which QEMU's default CPU executes."""
RUN_CODE = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("{code}"))
function = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_uint)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
"""
BX_LR = 0xE12FFF1E

INSTRUCTIONS = [
    (0xB8200041, "lse", ("cortex-a53", "cortex-a72")),  # ldadd w0, w1, [x2]
    (0xB8BFC020, "rcpc", ("cortex-a53", "cortex-a72")),  # ldapr w0, [x1]
    (0x4E829420, "dotprod", ("cortex-a53", "cortex-a72")),  # sdot v0.4s, v1.16b, v2.16b
    (0x4E421420, "fullfp16", ("cortex-a53", "cortex-a72")),  # fadd v0.8h, v1.8h, v2.8h
    (0x4E284820, "aes", ("cortex-a53", "cortex-a72")),  # aese v0.16b, v1.16b
    (0x04A10020, "sve", ("cortex-a53", "cortex-a72", "cortex-a76")),  # add z0.s, z1.s, z1.s
    (0x6E42FC20, "bf16", ("cortex-a53", "cortex-a72", "cortex-a76")),  # bfdot v0.4s, v1.8h, v2.8h
    (0x4E82A420, "i8mm", ("cortex-a53", "cortex-a72", "cortex-a76")),  # smmla v0.4s, v1.16b, v2.16b
    (0x885F7C20, "", ()),  # ldxr w0, [x1]
    (0x1AC04020, "", ()),  # crc32b w0, w1, w0
    (0xDAC10020, "pauth", ("cortex-a53", "cortex-a72", "cortex-a76")),  # pacia x0, x1
    (0xD65F0BFF, "pauth", ("cortex-a53", "cortex-a72", "cortex-a76")),  # retaa
    (0xD71F0801, "pauth", ("cortex-a53", "cortex-a72", "cortex-a76")),  # braa x0, x1
    (0xD503233F, "", ()),  # paciasp, a hint
    (0xD50323BF, "", ()),  # autiasp, a hint
    (0x00001234, "", ()),  # udf: data
]
"""Instruction words, the extension that LLVM reports for each, and the CPUs that do not have it."""


@pytest.fixture(scope="module")
def disassembler(product_config: Config) -> Disassembler:
    needs_the_machine()
    with locked(product_config.build_root / "for-the-tests"):
        return Disassembler(extracted_tools.cpu_tools(product_config))


@pytest.mark.parametrize("name", ["cortex-a53", "cortex-a72", "cortex-a76"])
def test_each_cpu_has_its_instructions(disassembler: Disassembler, name: str) -> None:
    cpu = cpu_gate.load_cpu(name)
    extensions = list(cpu_gate._data()["extensions"])
    words = np.unique(np.array([word for word, _, _ in INSTRUCTIONS], np.uint32))
    found = unsupported(disassembler, words, name, without=cpu.without, extensions=extensions)
    named = {int(word): extension for extension, seen in found.items() for word in seen}
    assert named == {word: extension for word, extension, lacking in INSTRUCTIONS if name in lacking}


def test_names_are_demangled(disassembler: Disassembler) -> None:
    assert disassembler.demangled(["_ZN1a1bEi", "plain"]) == ["a::b(int)", "plain"]


# ------------------------------------------------------------------------------------------------ in a container


@pytest.fixture(scope="module")
def audited_config(product_config: Config, built: main_job.Built, disassembler: Disassembler) -> Config:
    """Return the configuration of the shared build, whose target root is available as an image."""
    return product_config


def audited(config: Config, folder: Path, code: str) -> Audited:
    """Audit a wheel with one module."""
    wheel = make_wheel(folder, {"thing.py": code}, tag="py3-none-any")
    return audit_wheel.audit(config, wheel.name, folder=folder, cpu="cortex-a7")


def module(*words: int) -> str:
    return RUN_CODE.format(code=b"".join(word.to_bytes(4, "little") for word in words).hex()) + "function(1)\n"


@pytest.mark.engine
@pytest.mark.emulation
def test_an_instruction_of_a_newer_cpu_is_caught_by_the_run(audited_config: Config, tmp_path: Path) -> None:
    done = audited(audited_config, tmp_path, module(CRC32, BX_LR))
    assert [(step.step, step.signal) for step in done.probed.steps] == [("import thing", 4)]
    assert done.verdict == FAIL


@pytest.mark.engine
@pytest.mark.emulation
def test_a_wheel_that_runs_passes(audited_config: Config, tmp_path: Path) -> None:
    done = audited(audited_config, tmp_path, module(BX_LR))
    assert [(step.step, step.result) for step in done.probed.steps] == [("import thing", "ok")]
    assert done.verdict == PASS


@pytest.mark.engine
@pytest.mark.emulation
def test_wheel_that_cannot_be_imported_does_not_pass(audited_config: Config, tmp_path: Path) -> None:
    done = audited(audited_config, tmp_path, "import no_such_module\n")
    assert done.verdict == INCOMPLETE
    assert "no_such_module" in done.probed.steps[0].error


@pytest.mark.engine
def test_a_missing_root_is_reported(audited_config: Config, tmp_path: Path) -> None:
    image = dataclasses.replace(audited_config.image, name="pitorch-absent")
    done = audited(dataclasses.replace(audited_config, image=image), tmp_path, "")
    assert done.verdict == INCOMPLETE
    assert "./inv build-image --only=rootfs" in done.probed.reason


# ------------------------------------------------------------------------------------------------ known wheels


@pytest.fixture(scope="module")
def arm64_config(product_config: Config, disassembler: Disassembler) -> Config:
    """Return the configuration of the shared build for arm64, with the target root as an image."""
    config = dataclasses.replace(
        product_config, image=dataclasses.replace(product_config.image, architecture="arm64", companions=False)
    )
    with contextlib.closing(connect()) as client:
        try:
            client.images.get(config.image_reference("rootfs"))
        except docker.errors.ImageNotFound:
            main_job.build_image(config, only=["rootfs"])
    return config


@pytest.mark.expensive
@pytest.mark.engine
@pytest.mark.emulation
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("version", "cpu", "verdict"),
    [
        ("2.9.1", "cortex-a53", PASS),
        ("2.9.1", "cortex-a72", PASS),
        ("2.9.1", "cortex-a76", PASS),
        ("2.10.0", "cortex-a53", FAIL),
        ("2.10.0", "cortex-a72", FAIL),
        ("2.10.0", "cortex-a76", PASS),
    ],
)
def test_known_wheels_of_torch(arm64_config: Config, tmp_path: Path, version: str, cpu: str, verdict: str) -> None:
    done = audit_wheel.audit(arm64_config, f"torch=={version}", folder=tmp_path, cpu=cpu)
    assert done.verdict == verdict, done.as_json()
    assert done.static.count(CHECKED) > 1000
    # The static check and the probe must each give the same verdict.
    assert (done.static.count(UNCHECKED) > 0) == (verdict == FAIL)
    assert done.probed.verdict == verdict
