"""Tests of the CPU gate's static part on small arm64 files, and of its result as a table and as JSON."""

from __future__ import annotations

import io
import json
import re
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from rich.console import Console
from wheel_parts import EM_AARCH64, EM_ARM, HARD, elf, make_wheel

from engine.containers import Ran
from flow import audit_wheel
from flow.audit_wheel import FAIL, INCOMPLETE, PASS, Audited, Probed, Step
from images.flavour import load_suite
from toolchain.architecture import ARCHITECTURES
from toolchain.config import Config, load_config
from toolchain.errors import ChecksFailed, ConfigError, SourceUnavailable, WheelUnusable
from wheels import cpu_gate, download
from wheels.cpu_gate import CHECKED, UNCHECKED, UNPROVEN, Function, Static
from wheels.instructions import Disassembler, Words

TEXT = 0x10000
NOP, RET = 0xD503201F, 0xD65F03C0
LDADD = 0xB8200041
"""ldadd w0, w1, [x2]"""
SDOT = 0x4E829420
"""sdot v0.4s, v1.16b, v2.16b"""
FLAG = (0x90000010, 0x39402610, 0x34000070)
"""adrp x16, PAGE; ldrb w16, [x16, #9]; cbz w16, .+12"""
FUNC, IFUNC, LOCAL, GLOBAL = 2, 10, 0, 16
BEYOND = {"lse": LDADD, "dotprod": SDOT}
CPU = cpu_gate.load_cpu("cortex-a53")


def bl(source: int, target: int) -> int:
    """Encode ``bl`` from one word of the code to another."""
    return 0x94000000 | (target - source & 0x3FFFFFF)


def program(
    words: Sequence[int],
    symbols: Mapping[str, int | tuple[int, int]] | None = None,
    *,
    frames: Sequence[int] = (),
    pointers: Sequence[int] = (),
    dynamic: bool = False,
) -> ELFFile:
    """Return an arm64 file.

    ``symbols`` maps a name to a word's number, together with type and binding unless the symbol is a local function.
    ``frames`` are the words with an entry in .eh_frame_hdr, ``pointers`` those with a relocation in a table.
    """
    texts, table = b"\0", bytes(24)
    for name, value in (symbols or {}).items():
        at, info = value if isinstance(value, tuple) else (value, FUNC)
        table += struct.pack("<IBBHQQ", len(texts), info, 0, 1, TEXT + 4 * at, 0)
        texts += name.encode() + b"\0"
    header = TEXT + 0x8000
    rows = b"".join(struct.pack("<ii", TEXT + 4 * at - header, 0) for at in frames)
    parts = {
        ".text": (1, 6, TEXT, struct.pack(f"<{len(words)}I", *words), 0),
        ".dynsym" if dynamic else ".symtab": (11 if dynamic else 2, 0, 0, table, 3),
        ".strtab": (3, 0, 0, texts, 0),
        ".eh_frame_hdr": (1, 2, header, b"\x01\x1b\x03\x3b" + struct.pack("<iI", 0, len(frames)) + rows, 0),
        ".rela.dyn": (4, 2, 0, b"".join(struct.pack("<QIIq", 0, 1027, 0, TEXT + 4 * at) for at in pointers), 0),
    }
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*parts, ".shstrtab"))
    body, headers = b"", bytes(64)
    for name, (kind, flags, address, content, link) in {**parts, ".shstrtab": (3, 0, 0, names, 0)}.items():
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        size = 24 if kind in (2, 4, 11) else 0
        headers += struct.pack("<IIQQQQIIQQ", at, kind, flags, address, 64 + len(body), len(content), link, 0, 1, size)
        body += content + bytes(-len(content) % 8)
    count = len(headers) // 64
    ident = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    start = struct.pack("<HHIQQQIHHHHHH", 3, EM_AARCH64, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, count, count - 1)
    return ELFFile(io.BytesIO(ident + start + body + headers))


@pytest.fixture(autouse=True)
def two_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace LLVM's tables with two known instructions. The integration tests use LLVM itself."""

    def unsupported(_: Disassembler, words: Words, *_args: object, **_options: object) -> Mapping[str, Words]:
        found = {name: np.intersect1d(words, np.array([word], np.uint32)) for name, word in BEYOND.items()}
        return {name: seen for name, seen in found.items() if seen.size}

    monkeypatch.setattr(cpu_gate, "unsupported", unsupported)


def found_in(file: ELFFile) -> list[tuple[str, str, str]]:
    """Return the name, state and reason of each function that is found."""
    read = cpu_gate._Program.read(file)
    found = cpu_gate._functions("a.so", read, CPU, Disassembler(Path("/nowhere")))
    return [(item.name, item.state, item.reason) for item in found]


def test_an_atomic_instruction_without_a_check_is_found() -> None:
    assert found_in(program([NOP, RET, NOP, LDADD, RET], {"first": 0, "second": 2})) == [("second", UNCHECKED, "")]


def test_a_program_of_the_cpu_has_no_findings() -> None:
    assert found_in(program([NOP, RET], {"first": 0})) == []


def test_vector_instructions_are_unproven() -> None:
    assert found_in(program([SDOT, LDADD, RET], {"kernel": 0})) == [("kernel", UNPROVEN, "")]


def test_a_flag_right_before_the_instruction_is_a_check() -> None:
    assert found_in(program([*FLAG, LDADD, RET])) == [(".text+0x0", CHECKED, "outline-atomics helper")]


def test_a_second_instruction_without_the_flag_is_unchecked() -> None:
    ((_, state, _),) = found_in(program([*FLAG, LDADD, RET, LDADD], {"f": 0}))
    assert state == UNCHECKED


@pytest.mark.parametrize(
    "name",
    [
        "__aarch64_ldadd4_acq_rel",
        "sgemm_kernel_NEOVERSEN1",
        "dot_kernel_sve",
        "xnn_qd8_f32_qc8w_gemm_minmax_ukernel_4x16c4__neondot",
        "kai_run_matmul_clamp_f32_qai8dxp1x8_qsi4cxp8x8_1x8x32_neon_dotprod",
        "_ZN2at6native7SVE25612_GLOBAL__N_13fooEv",
        "_ZN2np10qsort_simd13QSort_ASIMDHPItEEvPT_l",
        "Sleef_finz_fabsfx_sve",
    ],
)
def test_names_of_dispatched_functions_are_checks(name: str) -> None:
    ((_, state, reason),) = found_in(program([SDOT, RET], {name: 0}))
    assert state == CHECKED
    assert reason.startswith("name")


@pytest.mark.parametrize("name", ["main", "_ZN3c1010intrusive_ptrE", "mi_free_block_delayed_mt", "save", "resume"])
def test_other_names_are_not_checks(name: str) -> None:
    ((_, state, _),) = found_in(program([LDADD, RET], {name: 0}))
    assert state == UNCHECKED


WITH_CHECK = [bl(0, 6), bl(1, 4), RET, NOP, SDOT, RET, RET]
NAMES = {"caller": 0, "kernel": 4, "getauxval": 6}


def test_function_called_only_by_checking_code_is_checked() -> None:
    assert found_in(program(WITH_CHECK, NAMES)) == [("kernel", CHECKED, "all callers are checked")]


def test_second_caller_without_a_check_is_found() -> None:
    words = [*WITH_CHECK, bl(7, 4), RET]
    assert found_in(program(words, {**NAMES, "other": 7})) == [("kernel", UNPROVEN, "")]


def test_a_pointer_in_a_table_counts_as_an_unknown_caller() -> None:
    assert found_in(program(WITH_CHECK, NAMES, pointers=[4])) == [("kernel", UNPROVEN, "")]


def test_an_exported_function_has_unknown_callers() -> None:
    symbols = {name: (at, FUNC | GLOBAL) for name, at in NAMES.items()}
    assert found_in(program(WITH_CHECK, symbols, dynamic=True)) == [("kernel", UNPROVEN, "")]


def test_the_function_that_checks_is_checked() -> None:
    words = [bl(0, 3), SDOT, RET, RET]
    assert found_in(program(words, {"f": 0, "getauxval": 3})) == [("f", CHECKED, "calls getauxval")]


def test_the_choice_of_an_ifunc_resolver_is_checked() -> None:
    words = [0x90000000, 0x91000000 | 3 << 10 << 2, RET, SDOT, RET]  # adrp x0, .; add x0, x0, #12
    found = found_in(program(words, {"resolver": (0, IFUNC), "kernel": 3}))
    assert found == [("kernel", CHECKED, "chosen by an ifunc resolver")]


ADRP, ADD = 0x90000000, 0x91000000
"""adrp x0, PAGE; add x0, x0, #0"""


@pytest.mark.parametrize(
    ("between", "state"),
    [
        ([NOP] * 10, CHECKED),
        ([0xF9400024] * 4, CHECKED),  # ldr x4, [x1]
        ([0x4EA01C00], CHECKED),  # mov v0.16b, v0.16b
        ([0xF9000020], CHECKED),  # str x0, [x1]
        ([0xB4000020], CHECKED),  # cbz x0, 4 bytes on
        ([0xD2800000], UNCHECKED),  # mov x0, #0
        ([0xAA0103E0], UNCHECKED),  # mov x0, x1
        ([0xF9400020], UNCHECKED),  # ldr x0, [x1]
    ],
)
def test_address_is_followed_until_its_register_changes(between: Sequence[int], state: str) -> None:
    kernel = 3 + len(between)
    words = [ADRP, *between, ADD | kernel << 12, RET, LDADD, RET]
    ((name, found, _),) = found_in(program(words, {"dot_k_NEOVERSEV1": 0, "dot_thread_function": kernel}))
    assert (name, found) == ("dot_thread_function", state)


def test_functions_of_a_stripped_file_are_separate() -> None:
    found = found_in(program([LDADD, RET, *FLAG, LDADD, RET], frames=[0, 2]))
    assert found == [(".text+0x0", UNCHECKED, ""), (".text+0x8", CHECKED, "outline-atomics helper")]


def test_data_in_code_is_left_out() -> None:
    marks = {"$x": (0, LOCAL), "$d": (2, LOCAL), "$x.1": (3, LOCAL)}
    assert found_in(program([NOP, RET, LDADD, NOP], {"f": 0, **marks})) == []


@pytest.mark.parametrize(("length", "found"), [(4, []), (3, [("first", UNPROVEN, "")])])
def test_text_in_code_is_left_out(length: int, found: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    text = struct.unpack("<I", b"GHAS")[0]
    monkeypatch.setitem(BEYOND, "dotprod", text)
    assert found_in(program([NOP, RET, *[text] * length, NOP], {"first": 0})) == found


def test_a_wheel_is_examined_with_its_folders(tmp_path: Path) -> None:
    file = program([LDADD, RET], {"f": 0})
    file.stream.seek(0)
    wheel = make_wheel(tmp_path, {"p/a.so": file.stream.read(), "p/__init__.py": ""}, tag="cp313-cp313-linux_aarch64")
    static = cpu_gate.examine(wheel, CPU, Disassembler(tmp_path))
    assert static.files == 1
    assert static.functions == (Function("p/a.so", "f", {"LSE atomics": 1}, UNCHECKED, ""),)


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [("a.so", 10, []), ("a.so", 14, [UNCHECKED]), ("torch.libs/libXNNPACK-57c47154.so.0.20241108", 14, [UNPROVEN])],
)
def test_32_bit_files_are_judged_by_their_attributes(tmp_path: Path, name: str, value: int, state: list[str]) -> None:
    # Tag_ABI_VFP_args becomes Tag_CPU_arch; the flag in the header marks the file as hard-float.
    content = elf(EM_ARM, flags=HARD, vfp_args=1).replace(bytes([28, 1]), bytes([6, value]))
    wheel = make_wheel(tmp_path, {name: content})
    static = cpu_gate.examine(wheel, cpu_gate.load_cpu("cortex-a7"), Disassembler(tmp_path))
    assert [item.state for item in static.functions] == state


def test_an_unknown_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected one of cortex-a53, .* found 'i486'"):
        cpu_gate.load_cpu("i486")


# ------------------------------------------------------------------------------------------------ the probe


def test_the_probe_of_an_unknown_package_imports_its_modules(tmp_path: Path) -> None:
    contents = {"one/__init__.py": "", "one/two/__init__.py": "", "three.py": "", "lib-x.so": "", "thing.libs/a.so": ""}
    assert cpu_gate.probe_of(make_wheel(tmp_path, contents)) == [("import one, three", "import one, three")]


def test_the_probe_of_torch_runs_operators(tmp_path: Path) -> None:
    steps = dict(cpu_gate.probe_of(make_wheel(tmp_path, {}, name="torch")))
    assert {"import torch", "matmul", "conv2d", "linear bfloat16", "linear half", "linear int8", "lstm"} <= set(steps)


def test_a_wheel_without_modules_cannot_be_probed(tmp_path: Path) -> None:
    with pytest.raises(WheelUnusable, match="no importable module"):
        cpu_gate.probe_of(make_wheel(tmp_path, {"data.txt": ""}))


def test_dependencies_follow_the_markers_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "index"
    tag = "py3-none-any"
    make_wheel(index, {}, name="second", tag=tag, requires="first")
    make_wheel(index, {}, name="first", tag=tag, requires="second>=1")
    make_wheel(index, {}, name="other", tag=tag)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    target, suite = ARCHITECTURES["arm64"], load_suite("trixie")
    for machine, expected in (("aarch64", ["first", "second"]), ("x86_64", [])):
        folder = tmp_path / machine
        requires = f'first; platform_machine == "{machine}"\nRequires-Dist: other; extra == "more"'
        wheel = make_wheel(folder, {}, tag=tag, requires=requires)
        (into := folder / "into").mkdir()
        found = download.dependencies(wheel, into, target, suite, tmp_path / "log")
        assert sorted(path.name.partition("-")[0] for path in found) == expected
    with pytest.raises(SourceUnavailable, match="does not have absent"):
        download.download("absent==1.0", tmp_path, target, suite, tmp_path / "log")


def test_dependencies_include_those_of_requested_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``thing`` requires ``first`` twice, and ``first`` lists its extra ``All`` in terms of another extra."""
    index = tmp_path / "index"
    tag = "py3-none-any"
    rows = ['other; extra == "more"', 'first[more]; extra == "all"', 'absent; extra == "unused"']
    make_wheel(index, {}, name="first", tag=tag, requires="\nRequires-Dist: ".join(rows))
    make_wheel(index, {}, name="other", tag=tag)
    make_wheel(index, {}, name="plain", tag=tag, requires="first")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wheel = make_wheel(tmp_path, {}, tag=tag, requires="plain\nRequires-Dist: first[All]>=1")
    found = download.dependencies(wheel, tmp_path, ARCHITECTURES["arm64"], load_suite("trixie"), tmp_path / "log")
    assert sorted(path.name.partition("-")[0] for path in found) == ["first", "other", "plain"]


def test_a_requirement_with_a_url_is_reported(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {}, tag="py3-none-any", requires="other @ https://example.org/other.zip")
    with pytest.raises(WheelUnusable, match="requires a file from a URL") as caught:
        download.dependencies(wheel, tmp_path, ARCHITECTURES["arm64"], load_suite("trixie"), tmp_path / "log")
    assert "https://example.org/other.zip" in caught.value.found


@pytest.mark.parametrize("requires", ["torch (>=1.9.*)", "torch – 1.9"])
def test_an_invalid_requirement_of_a_wheel_is_reported(tmp_path: Path, requires: str) -> None:
    wheel = make_wheel(tmp_path, {}, tag="py3-none-any", requires=requires)
    with pytest.raises(WheelUnusable, match="has an invalid requirement") as caught:
        download.dependencies(wheel, tmp_path, ARCHITECTURES["arm64"], load_suite("trixie"), tmp_path / "log")
    assert caught.value.found.startswith("torch ")


@pytest.mark.parametrize(
    ("contents", "requires", "reason"),
    [({"one.py": ""}, "absent==1", "does not have absent==1"), ({"data.txt": ""}, "", "no importable module")],
)
def test_a_wheel_that_cannot_be_run_is_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, str], requires: str, reason: str
) -> None:
    """The result of the static check is then still printed."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wheel = make_wheel(tmp_path, contents, tag="py3-none-any", requires=requires)
    probed = audit_wheel._run(Config(), wheel, tmp_path, CPU, tmp_path / "log")
    assert probed.verdict == INCOMPLETE
    assert reason in probed.reason


# ------------------------------------------------------------------------------------------------ the result

OK = Step("import one", 0, "")


def probe_on_this_pc(monkeypatch: pytest.MonkeyPatch, folder: Path, steps: Sequence[tuple[str, str]]) -> Probed:
    """Run the probe's script without a container; ``hwcap`` is that of the emulated CPU."""

    def run_in(_client: object, _image: str, argv: Sequence[str], **_options: object) -> Ran:
        script = [sys.executable, str(Path(audit_wheel.__file__).parent / "cpu_probe.py"), argv[2]]
        _, *lines = subprocess.run(script, stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()
        return Ran("\n".join([json.dumps({"hwcap": [0, 0]}), *lines]), 0.0)

    monkeypatch.setattr(audit_wheel, "connect", io.BytesIO)
    monkeypatch.setattr(audit_wheel, "run_in", run_in)
    config = load_config({"image": {"architecture": "arm64"}, "build": {"folder": str(folder)}})
    return audit_wheel._probe(config, steps, folder, CPU, folder / "log")


def result(functions: Sequence[Function] = (), steps: Sequence[Step] = (OK,), reason: str = "") -> Audited:
    probed = Probed(tuple(steps) if not reason else (), reason)
    return Audited("one-1.0.whl", "0" * 64, CPU, Static(1, tuple(functions)), probed, ("unchecked: f(int) (1 LSE)",))


BAD = Function("one/a.so", "f", {"LSE atomics": 1}, UNCHECKED, "")
KERNEL = Function("one/a.so", "k", {"dot product": 9}, UNPROVEN, "")


@pytest.mark.parametrize(
    ("audited", "verdict"),
    [
        (result(), PASS),
        (result([KERNEL]), PASS),
        (result([BAD]), FAIL),
        (result([BAD], reason="no image"), FAIL),
        (result(steps=[OK, Step("matmul", 4, "")]), FAIL),
        (result(steps=[OK, Step("matmul", 11, "")]), INCOMPLETE),
        (result(steps=[Step("import one", 0, "ImportError: two")]), INCOMPLETE),
        (result(steps=[]), INCOMPLETE),
        (result(reason="no image"), INCOMPLETE),
    ],
)
def test_the_verdict_follows_from_both_parts(audited: Audited, verdict: str) -> None:
    assert audited.verdict == verdict
    assert json.loads(audited.as_json())["verdict"] == verdict.lower()
    if verdict == PASS:
        audited.require_pass()
    else:
        with pytest.raises(WheelUnusable if verdict == FAIL else ChecksFailed, match=re.escape("one-1.0.whl")):
            audited.require_pass()


@pytest.mark.parametrize(
    ("first", "second", "results"),
    [
        ("import os", "2", ["ok", "ok"]),
        ("print('loaded', end='', flush=True)", "2", ["ok", "ok"]),
        ("import os", "os._exit(0)", ["ok", "did not complete"]),
        ("import os; os.fork = None", "2", ["ok", "did not complete"]),
        ("import os; os._exit(0)", "2", ["did not complete", "did not complete"]),
        ("1 / 0", "2", ["ZeroDivisionError: division by zero"]),
    ],
)
def test_steps_of_the_probe_that_do_not_complete_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str, results: list[str]
) -> None:
    probed = probe_on_this_pc(monkeypatch, tmp_path, [("first", first), ("second", second)])
    assert [item.result for item in probed.steps] == results
    assert [item.step for item in probed.steps] == ["first", "second"][: len(results)]
    assert probed.verdict == (PASS if set(results) == {"ok"} else INCOMPLETE)


def test_both_parts_are_printed_in_80_columns() -> None:
    out = io.StringIO()
    long = Function(f"one/{'x' * 90}.so", "f", {"LSE atomics": 1, "fp16 arithmetic": 2}, UNPROVEN, "")
    audited = result([BAD, long], [OK, Step("linear " * 20, 4, "")])
    audited.print(Console(file=out, width=120))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for part in ("cortex-a53 (Raspberry Pi 3, Zero 2 W)", "unchecked: f(int)", "illegal instruction", "verdict: FAIL"):
        assert part in text


def test_a_project_is_not_a_wheel(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "setup.py").touch()
    (tmp_path / "loop.whl").symlink_to("loop.whl")
    config = Config()
    refused = {"./project": "is not a wheel", "absent.whl": "there is no wheel", "loop.whl": "there is no wheel"}
    for text, message in refused.items():
        with pytest.raises(SourceUnavailable, match=message):
            audit_wheel._wheel(config, text, tmp_path, tmp_path, tmp_path / "log")


def test_a_link_to_a_wheel_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "0123abcd").touch()
    (tmp_path / "thing-1.0-py3-none-any.whl").symlink_to("0123abcd")
    found = audit_wheel._wheel(Config(), "./thing-1.0-py3-none-any.whl", tmp_path, tmp_path, tmp_path / "log")
    assert found == tmp_path / "thing-1.0-py3-none-any.whl"
