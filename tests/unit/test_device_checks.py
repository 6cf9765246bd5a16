"""The checks of tests/gpu/test_training.py, on the CPU: so that their code is right when a GPU is at hand."""

from pathlib import Path

import pytest

from tests import device_checks as checks
from tests.compiling import QUICK


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_equals_fp64(precision: str) -> None:
    checks.check_step("cpu", precision)


def test_a_wrong_gradient_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: gradients that are too small by a tenth, on the device alone."""

    def lossy(config: checks.Config) -> object:
        loss, norm, gradients = one_step(config)
        return (
            loss,
            norm,
            {name: g * (0.9 if config.train.precision == "fp32" else 1.0) for name, g in gradients.items()},
        )

    one_step = checks.one_step
    monkeypatch.setattr(checks, "one_step", lossy)
    with pytest.raises(AssertionError):
        checks.check_step("cpu", "fp32")


def test_compiled_blocks_are_one_graph() -> None:
    checks.check_one_graph("cpu", QUICK)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp_equals_native(precision: str) -> None:
    checks.check_fsdp("cpu", precision)


def test_deepspeed_equals_native(tmp_path: Path) -> None:
    if reason := checks.lacking("deepspeed"):
        pytest.skip(reason)
    checks.check_engine("cpu", checks.write_config(tmp_path), tmp_path, "deepspeed")


def test_resume_is_bitwise(tmp_path: Path) -> None:
    checks.check_resume("cpu", checks.write_config(tmp_path), tmp_path)


def test_text_is_generated(tmp_path: Path) -> None:
    checks.check_generate("cpu", checks.write_config(tmp_path), tmp_path)
