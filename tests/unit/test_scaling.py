"""Who joins a run, when, and on how many ranks it goes on: without a process of a run."""

import json
import shlex
import sys
import time
from pathlib import Path

import pytest

from megacore.errors import ConfigError
from megacore.tools.relaunch import scaling
from megacore.tools.relaunch.fleet import Fleet, TooFew
from megacore.tools.relaunch.scaling import Rules, change, output, size_of
from tests.pool import PATIENCE

MODEL = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 128}
TRAIN = {"seq_len": 16, "micro_batch_size": 1, "global_batch_size": 12}
ANSWERS = f"{sys.executable} -c '' {{host}}"


class World:
    """A hostfile that changes, a clock, and a probe that every host answers but
    those that are said to be silent.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.file, self.silent = folder, folder / "hosts", set[str]()
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.config = folder / "config.json"
        self.config.write_text(json.dumps({"model": MODEL, "train": TRAIN, "data": {"train": "nothing"}}))

    def name(self, **hosts: int) -> None:
        self.file.write_text("".join(f"{host} slots={slots}\n" for host, slots in hosts.items()))

    def fleet(self, *overrides: str, spares: int = 0, **rules: object) -> Fleet:
        fleet = Fleet(
            self.file, str(self.config), list(overrides), ANSWERS, rules=Rules(**rules), spares=spares
        )  # type: ignore[arg-type]
        fleet.silence = lambda host: "asleep" if host in self.silent else None  # type: ignore[method-assign]
        return fleet

    def start(
        self, fleet: Fleet, *, gained: bool = True, failed: bool = False, lost: tuple[str, ...] = ()
    ) -> dict[str, int]:
        """Starts a run, which ends so; the hosts that it was given."""
        fleet.command(["deepspeed", "--hostfile", str(self.file), "x.py"], self.folder)
        fleet.ended(gained=gained, failed=failed, lost=lost)
        return fleet.used


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    found = World(tmp_path, monkeypatch)
    found.name(a=2)
    return found


@pytest.mark.parametrize(
    ("used", "there", "then", "due", "said"),
    [
        ({"a": 2}, {"a": 2}, {"a": 2}, True, ""),
        ({"a": 2}, {"a": 2, "b": 1}, {"a": 2, "b": 1}, True, "b joins: 2 ranks become 3"),
        ({"a": 2}, {"a": 2, "b": 1}, {"a": 2, "b": 1}, False, ""),  # not more often than
        ({"a": 2}, {"b": 2, "a": 2}, {"b": 2}, True, ""),  # as many ranks: nothing is won
        # which nobody can put off
        ({"a": 2, "b": 2}, {"a": 2}, {"a": 2}, False, "b leaves: 4 ranks become 2"),
        ({"a": 2, "b": 2}, {"a": 2, "c": 2}, {"a": 2, "c": 2}, False, "b leaves; c joins: 4 ranks become 4"),
        ({"a": 4}, {"a": 2}, {"a": 2}, False, "a has 2 slots: 4 ranks become 2"),
        ({"a": 2}, {"a": 4}, {"a": 4}, True, "a has 4 slots: 2 ranks become 4"),
        # by the user's command
        ({"a": 4}, {"a": 4}, {"a": 2}, True, "another size is wanted: 4 ranks become 2"),
        ({"a": 2}, {"b": 1}, {}, True, ""),  # nothing would be left: those that are there go on
    ],
)
def test_a_change_is_made_for_ranks_that_are_won_or_hosts_that_leave(
    used: dict[str, int], there: dict[str, int], then: dict[str, int], due: bool, said: str
) -> None:
    """A run would be stopped for nothing, or too often; or steps would be lost
    with a host that was said to leave.
    """
    assert change(used, there, then, due) == said


@pytest.mark.parametrize(
    ("room", "answer", "ranks"),
    [(1, None, 0), (2, None, 2), (9, None, 6), (9, 4, 4), (9, 1, 2), (9, 50, 6), (3, 5, 3), (1, 1, 0)],
)
def test_a_command_decides_between_the_least_and_the_most(room: int, answer: int | None, ranks: int) -> None:
    """Its answer would overrule what else the user has said, or what there is."""
    assert Rules(least=2, most=6).ranks(room, answer) == ranks


def test_a_host_joins_and_one_line_says_what_it_brings(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of five slots a batch of 12 takes four: the fifth must be named, and a host that
    brings no rank is no reason to stop.
    """
    fleet = world.fleet(pause=60.0)
    assert world.start(fleet) == {"a": 2}
    world.name(a=2, b=3)
    assert fleet.look() == "", "before its time"
    world.now += 60.0
    assert fleet.look(gained=False) == "", "it has not trained yet since its last start"
    assert fleet.look() == "b joins: 2 ranks become 4"
    world.start(fleet)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("supervise: 4 ranks on 2 of 2 hosts: parallel.tensor=1 ")
    assert line.endswith(
        "; data 4 is the largest for 5 slots and a global batch of 12; left over: b (1 slot)"
    )
    world.name(a=2, b=3, c=1)
    world.now += 60.0
    assert fleet.look() == "c joins: 4 ranks become 6" and world.start(fleet) == {"a": 2, "b": 3, "c": 1}
    world.name(a=2, b=3, c=2)
    world.now += 60.0
    assert fleet.look() == "", "seven do not divide the batch"
    world.name(a=2, c=2)
    assert fleet.look() == "b leaves; c has 2 slots: 6 ranks become 4", "at once"


def test_a_silent_host_joins_when_it_answers(world: World) -> None:
    """The hostfile need not change for it."""
    world.name(a=2, b=2)
    world.silent = {"b"}
    fleet = world.fleet()
    assert world.start(fleet) == {"a": 2} and fleet.look() == ""
    world.silent = set()
    assert fleet.look() == "b joins: 2 ranks become 4"


def test_a_host_that_joins_in_vain_is_left_out_longer_and_longer(world: World) -> None:
    """The run would fail with it again and again, until it is given up; or be stopped
    for it at every look.
    """
    fleet = world.fleet(pause=60.0)
    world.start(fleet)
    world.name(a=2, b=2)
    world.now += 60.0
    for seconds in (60.0, 120.0, 240.0):
        assert fleet.look() == "b joins: 2 ranks become 4"
        assert world.start(fleet, gained=False, failed=True) == {"a": 2, "b": 2}
        assert world.start(fleet) == {"a": 2}, "the next start is without it"
        world.now += seconds - 1.0
        assert fleet.look() == ""
        world.now += 1.0


def test_a_host_that_is_lost_again_and_again(world: World) -> None:
    """It comes back in time for each start. Where the rest are too few, it is used all the same."""
    world.name(a=2, b=2)
    fleet = world.fleet(pause=60.0)
    assert world.start(fleet, failed=True, lost=("b",)) == {"a": 2, "b": 2}
    assert world.start(fleet) == {"a": 2}
    world.now += 60.0
    assert fleet.look() == "b joins: 2 ranks become 4"
    assert world.start(world_least := world.fleet(pause=60.0, least=4), failed=True, lost=("b",)) == {
        "a": 2,
        "b": 2,
    }
    assert world.start(world_least) == {"a": 2, "b": 2}


def test_fewer_than_the_least_is_waited_for(world: World) -> None:
    """The run would go on with less than the user wants, or stop for a hostfile that says so."""
    world.name(a=2, b=2)
    fleet = world.fleet(least=3)
    world.start(fleet)
    world.name(a=2)
    assert fleet.look() == "", "as long as they are there, they go on"
    with pytest.raises(TooFew, match="--world: 2 ranks have room, and there shall be 3 at least"):
        world.start(fleet)


def test_at_most_so_many_and_as_the_command_says(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """The rest would be used, or not be named; and a command learns what it needs to decide."""
    world.name(a=4, b=4)
    script = (
        "import os; e = os.environ; print({'0': 3, '3': 12}[e['MEGACORE_RANKS']] if "
        "e['MEGACORE_ROOM'] == '8' else 1)"
    )
    fleet = world.fleet(most=6, command=(sys.executable, "-c", script))
    assert world.start(fleet) == {"a": 3}
    said = capsys.readouterr().out
    assert "; 3 of 8 slots are wanted; left over: a (1 slot), b (4 slots)" in said
    assert fleet.look() == "b joins: 3 ranks become 6"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('many')", "printed `many` (a number of ranks, 1 or more)"),
        ("", "printed `` (a number"),
        ("print(0)", "printed `0` (a number"),
        ("print('٣')", "printed `٣`"),
        ("import sys; sys.exit('no quota')", "ended with status 1: no quota (status 0)"),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "printed what is not UTF-8 text"),
    ],
)
def test_a_command_that_gives_no_answer(code: str, said: str, tmp_path: Path) -> None:
    """A size nobody has asked for, or a traceback."""
    with pytest.raises(ConfigError, match="^config error: --ranks-command: `.*` ") as error:
        Rules(command=(sys.executable, "-c", f"# -*- coding: utf-8 -*-\n{code}")).asked(1, 2, str(tmp_path))
    assert said in str(error.value)


def test_a_command_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it has started: the machines would never be looked at again."""
    monkeypatch.setattr(scaling, "COMMAND_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="--hosts-command: `.*` has not ended within 0 s"):
        output("--hosts-command", ("sh", "-c", "sleep 3600 & sleep 3600"), {})
    assert time.monotonic() - began < PATIENCE
    with pytest.raises(ConfigError, match="`nosuch-command` cannot be started: No such file"):
        output("--hosts-command", ("nosuch-command",), {})


def test_a_command_prints_the_hosts(world: World) -> None:
    """They come from a cloud's own tool, which knows what the run uses now."""
    code = "import os; print('a slots=2' + '\\nb slots=2' * (os.environ['MEGACORE_HOSTS'] == 'a'))"
    fleet = Fleet(None, str(world.config), [], ANSWERS, printed_by=(sys.executable, "-c", code))
    words = fleet.command(["deepspeed", "x.py"], world.folder)
    assert words[:4] == ["deepspeed", "--hostfile", str(world.folder / "hostfile"), "x.py"]
    assert fleet.look() == "b joins: 2 ranks become 4"
    fleet.printed_by = ("echo", shlex.quote("a"))
    with pytest.raises(ConfigError, match="^config error: --hosts-command: `echo .*` has a line"):
        fleet.look()


def test_the_supervisor_is_never_kept_waiting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks after the run five times a second, whatever a probe takes; what went
    wrong in a look is its to say.
    """
    monkeypatch.undo()
    fleet = world.fleet(poll=0.0)
    world.start(fleet)
    world.name(a=2, b=2)
    deadline = time.monotonic() + PATIENCE
    while not (why := fleet.changed(True)):
        assert time.monotonic() < deadline
    assert why == "b joins: 2 ranks become 4"
    world.file.write_text("a\n")
    with pytest.raises(ConfigError, match="has a line `a`"):
        while time.monotonic() < deadline:
            fleet.changed(True)


@pytest.mark.parametrize("text", ["0", "8:4", "x", "", "4:", "-1", "1.5", "1:2:3", "9" * 9, "٣"])
def test_sizes_that_are_none(text: str) -> None:
    """A traceback, or a range that holds nothing."""
    with pytest.raises(
        ConfigError, match=r"^config error: --world: .* is not a number of ranks \(a number such as 8"
    ):
        size_of("--world", text)
    assert (size_of("--world", "4"), size_of("--world", "2:8")) == ((4, 4), (2, 8))
