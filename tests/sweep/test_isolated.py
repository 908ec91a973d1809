"""Functions in processes of their own: whatever happens there, the next call works."""

import os
import signal
import time

import pytest

from bench.isolated import call, each


def act(what: str) -> str:
    if what == "raise":
        raise ValueError("on\npurpose")
    if what == "exit":
        os._exit(3)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hang":
        time.sleep(600)
    return f"{what} {os.environ.get('FXMEM_SWEEP_TEST', '')}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "error"),
    [("raise", "ValueError: on purpose"), ("exit", "exit code 3"), ("killed", "exit code -9")],
)
def test_what_goes_wrong_is_an_outcome_and_the_next_call_works(what: str, error: str) -> None:
    (_, bad), (_, good) = each(act, [what, "fine"], timeout_s=300)
    assert bad.value is None
    assert error in (bad.error or "")
    assert good.value == "fine "


def test_what_hangs_is_ended() -> None:
    outcome = call(act, "hang", timeout_s=1)
    assert outcome.error == "no end within 1 s"


def test_calls_share_a_process_until_it_has_done_its_number() -> None:
    pids = [outcome.value for _, outcome in each(process_id, range(5), timeout_s=300, num_calls=2)]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]


def process_id(_: int) -> int:
    return os.getpid()


def test_environment_is_the_callers_choice_and_not_the_callers_own() -> None:
    assert call(act, "x", timeout_s=300, environ={"FXMEM_SWEEP_TEST": "given"}).value == "x given"
    assert "FXMEM_SWEEP_TEST" not in os.environ
