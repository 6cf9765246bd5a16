"""Numbers and options that a clumsy or hostile user may give a script: see test_bad_inputs.py."""

import importlib
import inspect

import pytest

from megacore.distributed.rank_info import RankInfo
from megacore.errors import ConfigError
from tests.bad_inputs import HUGE, SUPERVISED, ZERO, Row, config, rows
from tests.conftest import Refused

FLEET = ("--probe", "touch @started", "deepspeed")

NUMBERS: list[Row] = [
    *(
        ("supervise", (*words, *SUPERVISED), "config error: --hostfile: its name is empty")
        for words in (("deepspeed", "--hostfile", ""), ("deepspeed", "--hostfile="), ("deepspeed", "-H", ""))
    ),
    ("plan", config("--world", "1" + "0" * 400), "00 ranks are more than any run has"),
    (
        "plan",
        config("--world", "2000000"),
        "config error: parallel: 2000000 ranks are more than any run has (at most 1,048,576)",
    ),
    *(
        ("plan", config("--output", f"@{'x' * length}.json"), "config error: --output: cannot write @xxx")
        for length in (236, 245, 250, 300)
    ),
    (
        "plan",
        config("--output", "@nowhere/x.json"),
        "config error: --output: cannot write @nowhere/x.json: No such file",
    ),
    (
        "plan",
        config("train.global_batch_size=2000000000"),
        "2,000,000,000 microbatches a step (at most 262,144: a larger train.micro_",
    ),
    (
        "plan",
        config("train.global_batch_size=300000", "parallel.pipeline=2"),
        "300,000 microbatches a step on 2 stages (at most 131,072",
    ),
    (
        "plan",
        config("parallel.pipeline=10000", "model.num_layers=10000"),
        "10000 stages are more than any run has (at most 1024)",
    ),
    *(
        (
            script,
            config("model.num_layers=1000000000000"),
            "model.num_layers: 1,000,000,000,000 layers are more than",
        )
        for script in ("pretrain", "plan")
    ),
    (
        "plan",
        config("train.global_batch_size=16384", "--plot", "@new.png"),
        "config error: --plot: 32,768 actions of a rank are more than",
    ),
    (
        "samples",
        config("--step", "1:3000000", "train.steps=3000000"),
        "config error: --step: 1:3000000 has 12,000,000 samples",
    ),
    ("samples", config("--prove", "train.global_batch_size=4000000000"), "4,000,000,000 microbatches a step"),
    *(
        ("drill", config("--soak", value), f"config error: --soak: {float(value)} is not usable")
        for value in ("-1", "nan", "0", "inf")
    ),
    *(
        ("drill", config("--fault", "kill:step=2", "--world", value), f"config error: --world: {value} is")
        for value in ("0", "-1", HUGE)
    ),
    (
        "drill",
        config("--fault", "kill:step=2", "--hang-seconds", "nan"),
        "config error: --hang-seconds: nan is not usable",
    ),
    (
        "pretrain",
        config("parallel.heartbeat_seconds=0.1"),
        "config error: parallel.heartbeat_seconds: 0.1 is not valid",
    ),
    (
        "pretrain",
        config("parallel.hang_seconds=1e300"),
        "config error: parallel.hang_seconds: 1e+300 is not valid",
    ),
    (
        "pretrain",
        config('log.statistics={"every": 15}'),
        "log.statistics: 15 is not a multiple of log.every 10 (10 or 20 would be)",
    ),
    (
        "pretrain",
        config('log.statistics={"every": 0}'),
        "config error: log.statistics: 0 is not valid: every: input should be greater",
    ),
    (
        "pretrain",
        config('log.statistics={"every": 10}', *ZERO),
        "config error: log.statistics: DeepSpeed updates and clears gradients at",
    ),
    *(
        ("pretrain", config(f"log.profile={value}"), f"config error: log.profile: {line}")
        for value, line in (
            ('{"steps": [2, 1]}', "steps: 1 is before 2 (the first step and the last, from 1 to 2)"),
            ('{"steps": [1, 3]}', "steps: 3 is beyond train.steps 2 (the"),
            (
                '{"steps": [1.5, 2]}',
                "1.5 is not valid: steps: input should be a valid integer ({steps, memory, ranks} or null)",
            ),
            ('{"steps": [0, 1]}', "0 is not valid: steps: "),
            ('{"steps": [1]}', "[1] is not valid: steps: "),
            ('{"steps": [1, 2], "ranks": [0, 1]}', "ranks: there is no rank 1 among 1 (from 0 to 0)"),
            ('{"steps": [1, 2], "ranks": [-1]}', "-1 is not valid: ranks: "),
            ('{"steps": [1, 2], "ranks": []}', "[] is not valid: ranks: "),
            ('{"step": [1, 2]}', "unknown key step ({steps, memory, ranks} or null)"),
            ("20", "20 is not valid: input should be an object"),
        )
    ),
    ("drill", config(), "config error: --fault: neither a fault nor --soak is given"),
    (
        "drill",
        config("--fault", "kill:step=2", "--launcher", "torchrun '"),
        "config error: --launcher: `torchrun '` is no command",
    ),
    (
        "drill",
        config("--fault", "kill:step=2", "--launcher", ""),
        "config error: --launcher: `` is no command: it is empty",
    ),
    (
        "drill",
        config("--fault", "kill:step=2", "--launcher", "nosuch {ranks"),
        "config error: --launcher: there is no command nosuch",
    ),
    ("drill", config("--fault", "hang:seconds=nan,step=2"), "its seconds are not usable"),
    ("drill", config("--fault", "kill:rank=0.5,step=2"), "kill:rank=0.5,step=2 is none"),
    *(
        (
            "supervise",
            (f"--{option}", value, "nosuch", *SUPERVISED),
            f"config error: --{option}: {value} is not usable",
        )
        for option, values in (
            ("restarts", ["-1"]),
            ("backoff", ["-1.0", "nan", "inf"]),
            ("stall", ["nan", "0.0"]),
            ("spares", ["-1"]),
            ("poll", ["nan", "0.0", "-1.0"]),
            ("resize-pause", ["nan", "inf", "-1.0"]),
        )
        for value in values
    ),
    (
        "supervise",
        ("--spares", "1", "torchrun", *SUPERVISED),
        "config error: --spares: the command has no --hostfile",
    ),
    *(
        (
            "supervise",
            (*words, "torchrun", *SUPERVISED),
            f"config error: {words[0]}: the command has no --hostfile",
        )
        for words in (("--world", "1:2"), ("--ranks-command", "echo 1"))
    ),
    *(
        ("supervise", ("--hosts-command", *words, *SUPERVISED), f"config error: --hosts-command: {line}")
        for words, line in (
            (("echo", "torchrun"), "torchrun takes no hostfile from it"),
            (("'", "deepspeed"), "' is no command"),
            (("echo a", "deepspeed", "--hostfile", "@hosts_one"), "stands beside --hostfile"),
            (("nosuchcommand", "deepspeed"), "`nosuchcommand` cannot be started"),
            (("false", "deepspeed"), "`false` ended with status 1"),
            (("true", "deepspeed"), "`true` names no host"),
            (("echo node1", "deepspeed"), "`echo node1` has a line `node1`"),
        )
    ),
    *(
        (
            "supervise",
            ("--world", value, "deepspeed", "--hostfile", "@hosts_one", *SUPERVISED),
            f"config error: --world: {line}",
        )
        for value, line in (
            ("0", "0 is not a number of ranks"),
            ("3:2", "3:2 is not a number of ranks"),
            ("2:4", "1 ranks have room, and there shall be 2"),
        )
    ),
    *(
        (
            "supervise",
            ("--ranks-command", value, "deepspeed", "-H", "@hosts_one", *SUPERVISED),
            f"config error: --ranks-command: {line}",
        )
        for value, line in (
            ("", " is no command"),
            ("false", "`false` ended with"),
            ("echo x", "`echo x` printed `x`"),
        )
    ),
    (
        "supervise",
        ("--probe", "'", "deepspeed", "--hostfile", "@hosts_one", *SUPERVISED),
        "config error: --probe: ' is no command",
    ),
    (
        "supervise",
        ("--probe", "", "deepspeed", "--hostfile", "@hosts_one", *SUPERVISED),
        "config error: --probe:  is no command: it is",
    ),
    *(
        (
            "supervise",
            ("--probe", "false {host}", "deepspeed", "--hostfile", f"@{name}", *SUPERVISED),
            f"config error: --hostfile: {line}",
        )
        for name, line in (
            ("hosts_two", "@hosts_two names localhost twice"),
            ("hosts_zero", "@hosts_zero gives localhost no slots"),
            ("hosts_garbage", "@hosts_garbage has a line `b.invalid 4`"),
            ("hosts_digits", "@hosts_digits has a line `localhost slots=999"),
            ("binary", "@binary is not UTF-8 text"),
            ("pipe", "cannot read @pipe: Not a plain file"),
            ("hosts_silent", "no host answered: a.invalid, b.invalid"),
            ("hosts_none", "@hosts_none names no host"),
        )
    ),
    *(
        (
            "supervise",
            (*FLEET, *filters, "--hostfile", "@hosts_one", *SUPERVISED, *more),
            f"config error: {line}",
        )
        for filters, more, line in (
            (
                ("--exclude", "node9"),
                (),
                "--exclude: the hostfile does not name `node9` (hosts such as localhost)",
            ),
            (("-e=localhost",), (), "--exclude: leaves no host"),
            (("--include=localhost:0",), (), "--include: `localhost:0` names single slots"),
            (("-i", "localhost", "-e", "localhost"), (), "--include: stands beside --exclude"),
            (
                (),
                ("parallel.tensor=2",),
                "--hostfile: its hosts have 1 slots, and the config needs 2 ranks (tensor 2 × pipeline 1 "
                "× data 1)",
            ),
        )
    ),
    *(
        (
            "preflight",
            ("--hostfile", f"@hosts_{name}", *config(*more), "--ssh", "touch @started"),
            f"config error: {line}",
        )
        for name, more, line in (
            ("two", (), "--hostfile: @hosts_two names localhost twice"),
            ("none", (), "--hostfile: @hosts_none names no host"),
            ("some_zero", (), "--hostfile: @hosts_some_zero gives b.invalid no slots"),
            ("garbage", (), "--hostfile: @hosts_garbage has a line"),
            ("nowhere", (), "--hostfile: cannot read @hosts_nowhere: No such file"),
            ("one", ("--exclude", "node9"), "--exclude: the hostfile does not name `node9`"),
            ("one", ("--port", "0"), "--port: 0 is no port"),
            ("one", ("--dry-run", "--json", "@a.json"), "--json: --dry-run finds nothing"),
            (
                "silent",
                ("parallel.tensor=2", "parallel.data=4"),
                "--hostfile: its hosts have 4 slots, and the config needs 8 ranks",
            ),
            ("silent", ("train.global_batch_size=6",), "train.global_batch_size: 6"),
        )
    ),
    (
        "preflight",
        ("--hostfile", "@hosts_one", *config(), "--ssh", "'"),
        "config error: --ssh: ' is no command",
    ),
    (
        "render",
        (*config("parallel.tensor=4"), "--nodes", "2", "--gpus", "1", "--image", "a", "--volume", "v"),
        "config error: parallel",
    ),
    (
        "render",
        (*config(), "--nodes", "0", "--gpus", "1", "--image", "a", "--volume", "v"),
        "config error: --nodes: 0 is too few",
    ),
]


@pytest.mark.parametrize(("script", "arguments", "line"), rows(NUMBERS))
def test_bad_input_is_one_line(script: str, arguments: tuple[str, ...], line: str, refused: Refused) -> None:
    """A traceback, silence, or a result that is none in place of one clear line."""
    refused(script, arguments, line)


BENCHMARKS = [
    *((name, "--rounds") for name in ("checkpoint", "context", "documents", "kernels", "schedules")),
    *((name, "--steps") for name in ("predicted", "throughput")),
    *(("attention", option) for option in ("--head-sizes", "--lengths")),
    *(("collectives", "--repeat"), ("heartbeats", "--hosts"), ("judging", "--world")),
]


@pytest.mark.parametrize(("name", "option"), BENCHMARKS)
@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "9" * 400, "٣"])
def test_a_benchmark_takes_whole_numbers_alone(name: str, option: str, value: str) -> None:
    """Else it divides by zero behind minutes of work, or never ends."""
    main = importlib.import_module(f"benchmarks.{name}")
    script = getattr(main, "main", None) or main.run
    places = [RankInfo()] * (len(inspect.signature(script).parameters) - 1)
    with pytest.raises(
        ConfigError, match=f"^config error: {option}: .* is not a whole number from 1 to 999999999"
    ):
        script([f"{option}={value}"], *places)
